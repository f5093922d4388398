"""Helm's provenance of the chart: the file beside it by which `helm install --verify` tells who made it.

It is the chart's description and the package's SHA-256, clear-signed by OpenPGP. gpg signs: the key stays where gpg
has it, in its keyring, in gpg-agent or on a card, where `helm package --sign` would want it exported. gpgv verifies, by
a file of public keys and nothing else, which is the file that `helm verify --keyring` takes.
"""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

from release.artifacts import digest
from release.signatures import DEADLINE_S, MAX_BYTES, NotVerified, provenance_name

CHART = "polyrl/Chart.yaml"
"""In the package."""


def sign_chart(folder: Path, version: str, key: str, keyring: Path) -> None:
    """Signs with the secret key that gpg knows by this name; `keyring` must have its public one. Raises NotVerified,
    and leaves nothing behind then."""
    if not key:
        raise NotVerified("PGP_KEY names no key; give the fingerprint or the address of an OpenPGP key that gpg has")
    target = folder / provenance_name(version)
    target.unlink(missing_ok=True)
    command: list[str | Path] = ["gpg", "--quiet", "--yes", "--local-user", key, "--clearsign", "--output", target]
    done = subprocess.run(command, input=_statement(folder, version), text=True)
    if done.returncode:
        raise NotVerified(f"gpg did not sign with {key} (status {done.returncode}); its own words stand above")
    try:
        verify_chart(folder, version, keyring)
    except NotVerified:
        target.unlink()
        raise


def verify_chart(folder: Path, version: str, keyring: Path) -> None:
    """That the provenance is that of the chart beside it, by a key of the keyring. Raises NotVerified."""
    path = folder / provenance_name(version)
    if not keyring.is_file():
        raise NotVerified(f"{keyring}: no such file; it holds public keys that sign charts, as gpg --export gives them")
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise NotVerified(f"{path}: no such file; the chart has no provenance")
    command: list[str | Path] = ["gpgv", "--quiet", "--keyring", keyring.absolute(), "--output", "-", path]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S)
    if done.returncode:
        raise NotVerified(f"{path}: not signed by a key of {keyring}")
    if done.stdout.split() != _statement(folder, version).split():
        raise NotVerified(f"{path}: of another chart than the one beside it")


def _statement(folder: Path, version: str) -> str:
    """What Helm signs: the chart's own description, and below it the hash of the package."""
    package = folder / f"polyrl-{version}.tgz"
    with tarfile.open(package) as archive:
        described = archive.extractfile(CHART)
        assert described is not None, f"{CHART} is a file"
        text = described.read(MAX_BYTES).decode()
    return f"{text.rstrip()}\n\n...\nfiles:\n  {package.name}: sha256:{digest(package)}\n"
