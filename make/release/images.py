"""Signatures of a release's images, in the registry beside them, where a cluster's admission finds them.

cosign signs each digest of the signed list with a key pair, and no service is asked: nothing is published but to the
registry. Twice, for admission is behind cosign: as a tag beside the image, which all that verify cosign's signatures
read, and as a bundle that refers to the image, which new ones write.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from release.artifacts import ROLES, images_name
from release.signatures import NotVerified, verify

LINE = re.compile(rf"(sha256:[0-9a-f]{{64}})  ({'|'.join(ROLES)})")
FORMATS = ("--new-bundle-format=false", "--new-bundle-format=true")
OFFLINE = ("--use-signing-config=false", "--tlog-upload=false", "--yes")
"""No transparency log: who signs with a key of his own is known by it."""
DEADLINE_S = 300
"""Of one signature or verification at a registry."""


def sign_images(folder: Path, version: str, signers: Path, *, home: str, key: str, public: Path, cosign: str) -> None:
    """Signs the images that `home` has under the digests of the release; raises NotVerified."""
    for reference in _references(folder, version, signers, home):
        for form in FORMATS:
            if _cosign(cosign, "sign", "--key", key, *OFFLINE, form, reference, shown=True):
                raise NotVerified(f"{reference}: cosign did not sign it with {key}; its own words stand above")
    verify_images(folder, version, signers, home=home, public=public, cosign=cosign)


def verify_images(folder: Path, version: str, signers: Path, *, home: str, public: Path, cosign: str) -> None:
    """That each image of the release is at `home`, signed in both forms; raises NotVerified."""
    if not public.is_file():
        raise NotVerified(f"{public}: no such file; it is the public half of the key that signs images, cosign.pub")
    for reference in _references(folder, version, signers, home):
        for form in FORMATS:
            if _cosign(cosign, "verify", "--key", str(public), "--insecure-ignore-tlog=true", form, reference):
                raise NotVerified(f"{reference}: not signed by {public} ({form.removeprefix('--')})")


def _references(folder: Path, version: str, signers: Path, home: str) -> Iterator[str]:
    """Of all four images, by the digests that the release's own signature covers."""
    verify(folder, version, signers)
    path = folder / images_name(version)
    if not path.is_file():
        raise NotVerified(f"{path}: no such file; this release has no images")
    found = {match[2]: match[1] for match in map(LINE.fullmatch, path.read_text().splitlines()) if match}
    if set(found) != set(ROLES):
        raise NotVerified(f"{path}: does not name each of {', '.join(ROLES)} with its digest")
    return (f"{home.rstrip('/')}/{role}@{found[role]}" for role in ROLES)


def _cosign(program: str, *arguments: str, shown: bool = False) -> int:
    """Its status. It asks for the key's passphrase itself, or takes COSIGN_PASSWORD."""
    output = None if shown else subprocess.DEVNULL
    return subprocess.run(
        [*program.split(), *arguments], stdout=output, stderr=output, env=os.environ, timeout=DEADLINE_S
    ).returncode
