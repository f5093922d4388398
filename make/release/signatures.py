"""Signs what a release is made of, and verifies what somebody has of it.

One signature, by `ssh-keygen -Y sign`, of the file of sums: it holds the hash of every other file, so nothing can be
changed, renamed or added without being noticed. The key is a file, or one that ssh-agent or a security key holds; its
passphrase is asked for by ssh-keygen itself. Signed for a purpose of its own, so that no signature that its owner gives
to commits or to other programs counts here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from release.artifacts import ROLES, SUMS, digest, images_name

SIGNATURE = f"{SUMS}.sig"
PURPOSE = "polyrl-release"
"""The signature's namespace, and the name under which the file of signers lists the keys."""
LINE = re.compile(r"([0-9a-f]{64})  (polyrl-[\w.+-]+)")
ARMOUR = re.compile(r"\s*-----BEGIN SSH SIGNATURE-----[\s\w+/=]+-----END SSH SIGNATURE-----\s*")
MAX_BYTES = 65_536
"""Of the sums, and of the signature: each is some 2 KB."""
DEADLINE_S = 60
"""Of one verification, which takes milliseconds."""
SHOWN_CHARACTERS = 100
"""Of a line that is refused; a right one has fewer."""
HOW = f'{PURPOSE} namespaces="{PURPOSE}" ssh-ed25519 AAAA...'


def provenance_name(version: str) -> str:
    """Helm's file beside the chart; signed by itself (`release.provenance`), after the sums, which do not name it."""
    return f"polyrl-{version}.tgz.prov"


class NotVerified(Exception):
    """One sentence: what is not as it was signed, or not signed."""


def files_of(version: str, *, images: bool) -> set[str]:
    """Names of a release's files, without those of the signature."""
    names = {f"polyrl-{version}{end}" for end in (".tar.gz", "-py3-none-any.whl", ".tgz", ".cdx.json")}
    if images:
        names.add(images_name(version))
        names |= {f"polyrl-{role}-{version}{end}" for role in ROLES for end in (".oci.tar", ".cdx.json")}
    return names


def sign(folder: Path, version: str, key: Path, signers: Path) -> None:
    """Signs the sums with the key, which `signers` must name; raises NotVerified, and leaves no signature behind."""
    if not key.is_file():
        raise NotVerified("KEY names no file; give the path of an OpenSSH key, or of its .pub where ssh-agent holds it")
    check_files(folder, _read(folder / SUMS).decode("ascii", "replace"), version)
    target = folder / SIGNATURE
    target.unlink(missing_ok=True)
    done = subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-n", PURPOSE, "-f", key, folder / SUMS])
    if done.returncode:
        raise NotVerified(f"ssh-keygen did not sign with {key} (status {done.returncode}); its own words stand above")
    try:
        verify(folder, version, signers)
    except NotVerified:
        target.unlink()
        raise


def verify(folder: Path, version: str, signers: Path) -> list[str]:
    """That all files in `folder` are those of the version, as one of the signers signed them.

    Returns the names of the release's files that are not there. Raises NotVerified."""
    if not signers.is_file():
        raise NotVerified(f"{signers}: no such file; it names the keys that may sign, one a line: {HOW}")
    sums, signature = _read(folder / SUMS), _read(folder / SIGNATURE)
    if not ARMOUR.fullmatch(signature.decode("ascii", "replace")):
        raise NotVerified(f"{folder / SIGNATURE}: holds something other than one SSH signature")
    checked: list[str | Path] = ["-n", PURPOSE, "-s", folder / SIGNATURE]
    if _ssh_keygen("verify", "-f", signers, "-I", PURPOSE, *checked, text=sums) != 0:
        if _ssh_keygen("check-novalidate", *checked, text=sums) == 0:
            raise NotVerified(f"{folder / SIGNATURE}: made with a key that {signers} does not name as {PURPOSE}")
        raise NotVerified(f"{folder / SUMS}: not what was signed; take neither it nor what lies beside it")
    return check_files(folder, sums.decode("ascii", "replace"), version)


def check_files(folder: Path, sums: str, version: str) -> list[str]:
    """That the sums name a whole release, and that what lies in the folder is what they name; returns what is missing.

    Raises NotVerified."""
    listed, without, whole = dict(_listed(sums)), files_of(version, images=False), files_of(version, images=True)
    lacking = (whole if set(listed) - without else without) - set(listed)
    for name in sorted(set(listed) - whole) or sorted(lacking):
        what = f"does not name {name}" if name in lacking else f"names {name}"
        raise NotVerified(f"{SUMS}: {what}; it is not that of the whole release {version}")
    beside = (SUMS, SIGNATURE, provenance_name(version))
    here = {path.name: path for path in folder.iterdir() if path.name not in beside}
    for name, path in sorted(here.items()):
        if name not in listed:
            raise NotVerified(f"{path}: nobody signed it; {SUMS} does not name it")
        if path.is_symlink() or not path.is_file() or digest(path) != listed[name]:
            raise NotVerified(f"{path}: not the file that was signed")
    if not here:
        raise NotVerified(f"{folder}: holds none of the files that {SUMS} names")
    return sorted(set(listed) - set(here))


def _listed(sums: str) -> Iterator[tuple[str, str]]:
    """Name and digest of each line."""
    names = set()
    for line in sums.splitlines():
        match = LINE.fullmatch(line)
        if match is None or match[2] in names:
            shown = line[:SHOWN_CHARACTERS]
            raise NotVerified(f"{SUMS}: a line is not a SHA-256, two spaces and a file's name, each once: {shown!r}")
        names.add(match[2])
        yield match[2], match[1]


def _read(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise NotVerified(f"{path}: no such file; a release that is not signed is not to be installed")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise NotVerified(f"{path}: larger than {MAX_BYTES:,} bytes; a release's is not")
    return content


def _ssh_keygen(action: str, *arguments: str | Path, text: bytes) -> int:
    command = ["ssh-keygen", "-q", "-Y", action, *arguments]
    return subprocess.run(command, input=text, capture_output=True, timeout=DEADLINE_S).returncode
