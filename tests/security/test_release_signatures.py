"""What a release is signed with, by the command that a release runs, and what somebody who has its files can tell.

Files that were changed, renamed, added or left out of the list, and signatures by others or for another purpose, are
refused in one sentence. With throw-away keys and the real ssh-keygen."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from release.artifacts import SUMS, manifest_digest, write_sums
from release.provenance import sign_chart, verify_chart
from release.signatures import PURPOSE, SIGNATURE, NotVerified, files_of, sign, verify

ROOT = Path(__file__).parents[2]
VERSION = "0.1.0"
WHEEL, CHART, IMAGE = "polyrl-0.1.0-py3-none-any.whl", "polyrl-0.1.0.tgz", "polyrl-trainer-0.1.0.oci.tar"


def ssh_keygen(*arguments: str | Path) -> None:
    subprocess.run(["ssh-keygen", "-q", *arguments], check=True, capture_output=True, timeout=60)


def write_chart(package: Path, version: str) -> None:
    """A package that has nothing but its description."""
    text = f"apiVersion: v2\nname: polyrl\nversion: {version}\n".encode()
    member = tarfile.TarInfo("polyrl/Chart.yaml")
    member.size = len(text)
    with tarfile.open(package, "w:gz") as archive:
        archive.addfile(member, io.BytesIO(text))


def build(folder: Path, *, version: str = VERSION, images: bool = True) -> Path:
    """A release's files, each with a content of its own."""
    folder.mkdir()
    for name in files_of(version, images=images):
        (folder / name).write_text(f"I am {name}")
    write_chart(folder / f"polyrl-{version}.tgz", version)
    write_sums(folder)
    return folder


@pytest.fixture(scope="module")
def gnupg() -> Iterator[None]:
    """gpg with keys of ours and of a stranger; its sockets' names are short."""
    with tempfile.TemporaryDirectory(prefix="g") as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNUPGHOME", home)
        for who in ("ours", "theirs"):
            gpg("--quick-generate-key", f"{who}@example.org", "ed25519", "sign", "never")
        yield
        subprocess.run(["gpgconf", "--kill", "gpg-agent"], check=True, timeout=60)


def gpg(*arguments: str) -> bytes:
    command = ["gpg", "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback", *arguments]
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, gnupg: None) -> Path:
    """Keys of ours and of a stranger, who we are, and a release that we signed."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "ours.gpg").write_bytes(gpg("--export", "ours@example.org"))
    for name in ("ours", "theirs"):
        ssh_keygen("-t", "ed25519", "-N", "", "-f", folder / name)
    (folder / "signers").write_text(f'{PURPOSE} namespaces="{PURPOSE}" {(folder / "ours.pub").read_text()}')
    sign(build(folder / "release"), VERSION, folder / "ours", folder / "signers")
    sign_chart(folder / "release", VERSION, "ours@example.org", folder / "ours.gpg")
    return folder


@pytest.fixture
def release(room: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(room / "release", tmp_path / "release"))


def test_what_was_signed_is_verified(room: Path, release: Path) -> None:
    assert verify(release, VERSION, room / "signers") == []
    (release / IMAGE).unlink()
    assert verify(release, VERSION, room / "signers") == [IMAGE]


def test_a_release_without_images_is_whole(room: Path, tmp_path: Path) -> None:
    folder = build(tmp_path / "release", images=False)
    sign(folder, VERSION, room / "ours", room / "signers")
    assert verify(folder, VERSION, room / "signers") == []
    (folder / IMAGE).write_text("I am one more")
    with pytest.raises(NotVerified, match=f"{IMAGE}: nobody signed it"):
        verify(folder, VERSION, room / "signers")


def by_stranger(room: Path, release: Path) -> None:
    """He signs the same sums."""
    (release / SIGNATURE).unlink()
    ssh_keygen("-Y", "sign", "-n", PURPOSE, "-f", room / "theirs", release / SUMS)


def for_git(room: Path, release: Path) -> None:
    """Our own signature, of a text that we signed as a commit."""
    (release / SIGNATURE).unlink()
    ssh_keygen("-Y", "sign", "-n", "git", "-f", room / "ours", release / SUMS)


def second_signature(room: Path, release: Path) -> None:
    ours = (release / SIGNATURE).read_text()
    by_stranger(room, release)
    (release / SIGNATURE).write_text(ours + (release / SIGNATURE).read_text())


def summed_anew(room: Path, release: Path) -> None:
    (release / WHEEL).write_text("I am another")
    (release / SIGNATURE).rename(room / "kept")
    write_sums(release)
    shutil.copyfile(room / "kept", release / SIGNATURE)


def fewer_lines(room: Path, release: Path) -> None:
    """The stranger leaves out what he changed."""
    lines = (release / SUMS).read_text().splitlines(keepends=True)
    (release / SUMS).write_text("".join(line for line in lines if WHEEL not in line))
    (release / WHEEL).write_text("I am another")


def older(room: Path, release: Path) -> None:
    """A whole release of ours, signed by us, under the name of a later one."""
    shutil.rmtree(release)
    build(release, version="0.0.9")
    sign(release, "0.0.9", room / "ours", room / "signers")


def older_under_new_names(room: Path, release: Path) -> None:
    older(room, release)
    for path in release.glob("polyrl-*"):
        path.rename(release / path.name.replace("0.0.9", VERSION))


def swapped(room: Path, release: Path) -> None:
    shutil.move(release / CHART, release / "kept")
    shutil.move(release / WHEEL, release / CHART)
    shutil.move(release / "kept", release / WHEEL)


def linked(room: Path, release: Path) -> None:
    """Right when it is verified, and anything when it is installed."""
    shutil.move(release / WHEEL, release.parent / WHEEL)
    (release / WHEEL).symlink_to(release.parent / WHEEL)


def nothing_else(room: Path, release: Path) -> None:
    for path in release.glob("polyrl-*"):
        path.unlink()


def replaced(name: str, text: str) -> Callable[[Path, Path], object]:
    return lambda _, release: (release / name).write_text(text)


ATTACKS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no signature": (lambda _, release: (release / SIGNATURE).unlink(), f"{SIGNATURE}: no such file; a release that"),
    "no sums": (lambda _, release: (release / SUMS).unlink(), f"{SUMS}: no such file"),
    "another's key": (by_stranger, "made with a key that .*signers does not name as polyrl-release$"),
    "another purpose": (for_git, f"{SUMS}: not what was signed; take neither"),
    "two signatures": (second_signature, "holds something other than one SSH signature$"),
    "no signature in the file": (replaced(SIGNATURE, "trust me\n"), "holds something other than one SSH signature$"),
    "a changed file": (replaced(WHEEL, "I am another"), f"{WHEEL}: not the file that was signed$"),
    "a changed image": (replaced(IMAGE, "I am another"), f"{IMAGE}: not the file that was signed$"),
    "a changed file, summed anew": (summed_anew, f"{SUMS}: not what was signed"),
    "a list of fewer files": (fewer_lines, f"{SUMS}: not what was signed"),
    "a file more": (replaced("polyrl-0.1.0-1.whl", "I am more"), "polyrl-0.1.0-1.whl: nobody signed it; "),
    "a hidden file more": (replaced(".pip", "I am more"), r"\.pip: nobody signed it; "),
    "names swapped": (swapped, f"{WHEEL}: not the file that was signed$"),
    "a link": (linked, f"{WHEEL}: not the file that was signed$"),
    "a folder": (lambda _, release: (release / "polyrl").mkdir(), "polyrl: nobody signed it"),
    "an older release": (older, f"{SUMS}: names polyrl-0.0.9.*; it is not that of the whole release {VERSION}"),
    "an older one, renamed": (older_under_new_names, f"{SUMS}: names polyrl-0.0.9"),
    "endless sums": (replaced(SUMS, "0" * 70_000), "larger than 65,536 bytes"),
    "nothing but the list": (nothing_else, "holds none of the files"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_was_not_signed_is_refused(room: Path, release: Path, attack: str) -> None:
    change, sentence = ATTACKS[attack]
    change(room, release)
    with pytest.raises(NotVerified, match=sentence) as refused:
        verify(release, VERSION, room / "signers")
    assert "\n" not in str(refused.value)


LISTS: dict[str, tuple[Callable[[str], str], str]] = {
    "fewer files": (lambda sums: re.sub(rf".*{CHART}\n", "", sums), f"does not name {CHART}; it is not that of"),
    "fewer images": (lambda sums: re.sub(rf".*{IMAGE}\n", "", sums), f"does not name {IMAGE}; it is not that of"),
    "more files": (lambda sums: sums + "0" * 64 + "  polyrl-more.whl\n", "names polyrl-more.whl"),
    "a name twice": (lambda sums: sums + sums.splitlines()[0] + "\n", "each once"),
    "another folder": (lambda sums: sums.replace("  polyrl-0", "  ../polyrl-0"), "each once"),
    "half a hash": (lambda sums: sums[1:], "a line is not a SHA-256"),
}


@pytest.mark.parametrize("case", LISTS)
def test_a_list_that_is_not_of_the_whole_release_is_not_signed(room: Path, tmp_path: Path, case: str) -> None:
    """Nor would it be verified, whoever signed it."""
    change, sentence = LISTS[case]
    folder = build(tmp_path / "release")
    (folder / SUMS).write_text(change((folder / SUMS).read_text()))
    with pytest.raises(NotVerified, match=sentence):
        sign(folder, VERSION, room / "ours", room / "signers")
    assert not (folder / SIGNATURE).exists()
    ssh_keygen("-Y", "sign", "-n", PURPOSE, "-f", room / "ours", folder / SUMS)
    with pytest.raises(NotVerified, match=sentence):
        verify(folder, VERSION, room / "signers")


def release_command(verb: str, folder: Path, room: Path, *more: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "release", verb, folder, "--version", VERSION]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "make")}
    return subprocess.run(
        [*command, "--signers", room / "signers", "--keyring", room / "ours.gpg", *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_the_command_signs_again_and_verifies(room: Path, release: Path) -> None:
    signed = release_command("sign", release, room, "--key", room / "ours", "--pgp-key", "ours@example.org")
    assert (signed.returncode, signed.stderr) == (0, "")
    (release / IMAGE).unlink()
    verified = release_command("verify", release, room)
    assert verified.stdout.splitlines() == [
        f"{release}: what lies here is PolyRL {VERSION} as signed by a key of {room / 'signers'}",
        f"signed, and not here: {IMAGE}",
    ]


def test_a_stranger_does_not_sign_and_no_key_is_printed(room: Path, release: Path) -> None:
    """Nor one that somebody gives in place of its file's path, nor one that others may read."""
    secret = (room / "theirs").read_text()
    shutil.copyfile(room / "theirs", release.parent / "open")
    (release.parent / "open").chmod(0o644)
    (release / SIGNATURE).unlink()
    for key, sentence in (
        (room / "theirs", "made with a key that"),
        (release.parent / "open", "ssh-keygen did not sign with"),
        (secret[:200], "KEY names no file"),
        ("", "KEY names no file"),
    ):
        done = release_command("sign", release, room, "--key", key, "--pgp-key", "ours@example.org")
        assert done.returncode == 3
        assert sentence in done.stderr.splitlines()[-1]
        assert not any(line in done.stdout + done.stderr for line in secret.splitlines()[1:-1])
        assert not (release / SIGNATURE).exists()


def test_a_chart_is_verified_by_its_own_signature_too(room: Path, release: Path) -> None:
    """As `helm install --verify` does: with the sums of another release, or without any."""
    provenance = release / f"{CHART}.prov"
    verify_chart(release, VERSION, room / "ours.gpg")
    signed = provenance.read_text()
    refused = "not signed by a key of .*ours.gpg$"
    for text, sentence in (
        (signed.replace("version: 0.1.0", "version: 0.1.1"), refused),
        ("trust me\n", refused),
        (signed.split("-----BEGIN PGP SIGNATURE")[0], refused),
    ):
        provenance.write_text(text)
        with pytest.raises(NotVerified, match=sentence):
            verify_chart(release, VERSION, room / "ours.gpg")
    provenance.write_text(signed)
    (release / CHART).write_bytes((release / CHART).read_bytes() + b" ")
    with pytest.raises(NotVerified, match=r"of another chart than the one beside it$"):
        verify_chart(release, VERSION, room / "ours.gpg")


def test_a_provenance_by_a_stranger_is_refused_by_the_command(room: Path, release: Path) -> None:
    with pytest.raises(NotVerified, match=r"not signed by a key of .*ours.gpg$"):
        sign_chart(release, VERSION, "theirs@example.org", room / "ours.gpg")
    assert not (release / f"{CHART}.prov").exists()
    done = release_command("verify", release, room)
    assert (done.returncode, done.stderr) == (3, f"{release / CHART}.prov: no such file; the chart has no provenance\n")
    for key, sentence in (("", "PGP_KEY names no key"), ("nobody@example.org", "gpg did not sign with nobody@")):
        done = release_command("sign", release, room, "--key", room / "ours", "--pgp-key", key)
        assert done.returncode == 3
        assert sentence in done.stderr.splitlines()[-1]
    (release / f"{CHART}.prov").symlink_to(room / "release" / f"{CHART}.prov")
    assert release_command("verify", release, room).returncode == 3


def test_the_command_refuses_in_one_sentence(room: Path, release: Path) -> None:
    (release / WHEEL).write_text("I am another")
    done = release_command("verify", release, room)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"{release / WHEEL}: not the file that was signed\n"
    done = release_command("verify", release, release)
    assert done.stderr.startswith(f"{release / 'signers'}: no such file; it names the keys that may sign, one a line: ")


def test_the_page_s_own_commands_verify_without_a_checkout(room: Path, release: Path) -> None:
    page = (ROOT / "docs/how-to/release.md").read_text()
    (commands,) = re.findall(r"```text\n(ssh-keygen -Y verify .*?)```", page, re.DOTALL)
    shutil.copyfile(room / "signers", release / "SIGNERS")

    def run() -> subprocess.CompletedProcess[str]:
        script = f"set -eu\n{commands}"
        return subprocess.run(["sh", "-c", script], cwd=release, capture_output=True, text=True, timeout=60)

    assert run().returncode == 0
    (release / IMAGE).unlink()
    assert f"{WHEEL}: OK" in run().stdout
    (release / WHEEL).write_text("I am another")
    assert run().returncode != 0
    write_sums(release)
    assert run().returncode != 0


def test_an_image_s_digest_is_the_one_that_its_archive_names(tmp_path: Path) -> None:
    digest = f"sha256:{'0a' * 32}"
    (tmp_path / "index.json").write_text(f'{{"schemaVersion": 2, "manifests": [{{"digest": "{digest}"}}]}}')
    assert manifest_digest(tmp_path) == digest
