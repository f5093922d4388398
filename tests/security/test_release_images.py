"""Images are signed in the registry that has them, and what was not signed there, or by somebody else, is refused.

With the real cosign against a registry on this machine, where both are in PATH (`cosign`, and `registry` of
go-containerregistry); which arguments it gets, and what its refusal becomes, with a program in its place."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from release.artifacts import ROLES, images_name, write_sums
from release.images import sign_images, verify_images
from release.signatures import PURPOSE, SIGNATURE, NotVerified, files_of, sign

VERSION = "0.1.0"
needs_cosign = pytest.mark.skipif(
    not (shutil.which("cosign") and shutil.which("registry")), reason="no cosign and registry in PATH"
)


@pytest.fixture(autouse=True)
def no_passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "")


def manifest_of(role: str) -> tuple[bytes, bytes]:
    """An image of one layer, and its manifest."""
    layer = f"I am {role}".encode()
    of_layer = {"digest": digest(layer), "size": len(layer)}
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [digest(layer)]}}
    )
    body = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    body["config"] = {  # type: ignore[assignment]
        "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(config.encode()), "size": len(config)
    }  # fmt: skip
    body["layers"] = [{"mediaType": "application/vnd.oci.image.layer.v1.tar"} | of_layer]  # type: ignore[assignment]
    return config.encode(), json.dumps(body).encode()


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A signed release whose list names real manifests."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "ours"], check=True, timeout=60)
    (tmp_path / "signers").write_text(f'{PURPOSE} namespaces="{PURPOSE}" {(tmp_path / "ours.pub").read_text()}')
    folder = tmp_path / "release"
    folder.mkdir()
    for name in files_of(VERSION, images=True):
        (folder / name).write_text(f"I am {name}")
    lines = [f"{digest(manifest_of(role)[1])}  {role}\n" for role in ROLES]
    (folder / images_name(VERSION)).write_text("".join(lines))
    write_sums(folder)
    sign(folder, VERSION, tmp_path / "ours", tmp_path / "signers")
    (tmp_path / "cosign.pub").write_text("a public key")
    return folder


def which(release: Path, home: str, cosign: str) -> dict[str, Any]:
    return {"home": home, "public": release.parent / "cosign.pub", "cosign": cosign}


def program(folder: Path, *, refuses: str) -> str:
    """In cosign's place: notes its arguments, and refuses where they hold this."""
    path = folder / "cosign"
    path.write_text(f'#!/bin/sh\necho "$@" >>{folder}/asked\ncase "$*" in *{refuses}*) exit 1;; esac\n')
    path.chmod(0o755)
    return str(path)


def test_each_image_of_the_signed_list_is_signed_by_its_digest_in_both_forms(release: Path) -> None:
    signers = release.parent / "signers"
    cosign = program(release.parent, refuses="nothing")
    sign_images(release, VERSION, signers, key="cosign.key", **which(release, "example.org/polyrl/", cosign))
    asked = (release.parent / "asked").read_text().splitlines()
    for role in ROLES:
        reference = f"example.org/polyrl/{role}@{digest(manifest_of(role)[1])}"
        lines = [line for line in asked if line.endswith(f" {reference}")]
        assert [line.split()[0] for line in lines] == ["sign", "sign", "verify", "verify"]
        assert [re.findall(r"bundle-format=(\w+)", line) for line in lines] == [["false"], ["true"]] * 2
    assert len(asked) == 4 * len(ROLES)


def test_what_cosign_refuses_is_one_sentence(release: Path) -> None:
    signers, key = release.parent / "signers", "cosign.key"
    for refuses, sentence in (
        ("sign --key", "did not sign it with cosign.key"),
        ("verify", "not signed by .*cosign.pub"),
    ):
        cosign = program(release.parent, refuses=f'"{refuses}"')
        with pytest.raises(NotVerified, match=f"example.org/operator@sha256:.*{sentence}"):
            sign_images(release, VERSION, signers, key=key, **which(release, "example.org", cosign))


def test_digests_that_nobody_signed_are_not_signed(release: Path) -> None:
    """Nor of a list that lacks one; nothing is asked of cosign then."""
    cosign, signers = program(release.parent, refuses="nothing"), release.parent / "signers"
    listed = release / images_name(VERSION)
    listed.write_text(listed.read_text().replace("sha256:", "sha256:0", 1))
    with pytest.raises(NotVerified, match=f"{listed.name}: not the file that was signed"):
        verify_images(release, VERSION, signers, **which(release, "example.org", cosign))
    listed.write_text("".join(listed.read_text().splitlines(keepends=True)[1:]))
    (release / SIGNATURE).unlink()
    write_sums(release)
    sign(release, VERSION, release.parent / "ours", signers)
    with pytest.raises(NotVerified, match="does not name each of operator, manager, rollout, trainer"):
        verify_images(release, VERSION, signers, **which(release, "example.org", cosign))
    (release.parent / "cosign.pub").unlink()
    with pytest.raises(NotVerified, match=r"cosign\.pub: no such file"):
        verify_images(release, VERSION, signers, **which(release, "example.org", cosign))
    assert not (release.parent / "asked").exists()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[str]:
    """A registry on this machine that has the four images."""
    command = ["registry", "-port", "0"]
    with (tmp_path / "registry").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
    try:
        port = None
        while port is None:
            assert process.poll() is None, (tmp_path / "registry").read_text()
            port = re.search(r"serving on port (\d+)", (tmp_path / "registry").read_text())
        url = f"127.0.0.1:{port[1]}"
        for role in ROLES:
            push(f"http://{url}/v2/{role}", role)
        yield url
    finally:
        process.kill()
        process.wait()


def push(url: str, role: str) -> None:
    config, manifest = manifest_of(role)
    for blob in (config, f"I am {role}".encode()):
        place = request("POST", f"{url}/blobs/uploads/", b"").headers["Location"]
        host = url.partition("/v2/")[0]
        request("PUT", f"{host}{place}?digest={digest(blob)}", blob)
    request("PUT", f"{url}/manifests/{VERSION}", manifest, "application/vnd.oci.image.manifest.v1+json")


def request(method: str, url: str, body: bytes, kind: str = "application/octet-stream") -> Any:
    asked = urllib.request.Request(url, data=body, method=method, headers={"Content-Type": kind})
    return urllib.request.urlopen(asked, timeout=10)


@needs_cosign
def test_the_real_cosign_verifies_what_was_signed_and_nothing_else(release: Path, home: str) -> None:
    """As a cluster's admission asks it: the image's digest, and the public key."""
    room, signers = release.parent, release.parent / "signers"
    for name in ("cosign", "theirs"):
        command = ["cosign", "generate-key-pair", "--output-key-prefix", name]
        subprocess.run(command, cwd=room, check=True, capture_output=True, timeout=60)
    with pytest.raises(NotVerified, match="not signed by"):
        verify_images(release, VERSION, signers, **which(release, home, "cosign"))
    sign_images(release, VERSION, signers, key=str(room / "cosign.key"), **which(release, home, "cosign"))
    (room / "cosign.pub").write_bytes((room / "theirs.pub").read_bytes())
    with pytest.raises(NotVerified, match=r"operator@sha256:\w+: not signed by"):
        verify_images(release, VERSION, signers, **which(release, home, "cosign"))
