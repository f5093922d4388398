"""`python -m release check`, `build`, `sign`, `verify`, `sign-images` and `verify-images`: the commands behind
`make release` and its neighbours.

Exit status: 0 done, 1 the builds differ or a program failed, 2 the tree or the images' base is no release's
(one line per reason), 3 what lies in the folder is not what was signed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from release.artifacts import ROLES, SUMS, Build, BuildError, Programs, differences, write_sums
from release.images import sign_images, verify_images
from release.lock import LOCK, PINS
from release.provenance import sign_chart, verify_chart
from release.rules import Tree, base_refusals, notes, refusals, version_of
from release.signatures import NotVerified, provenance_name, sign, verify
from release.surfaces import SURFACES

NO_RELEASE = 2
NOT_SIGNED = 3


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def tree_here() -> Tree:
    project, chart, changelog = (
        Path(name).read_text() for name in ("pyproject.toml", "charts/polyrl/Chart.yaml", "CHANGELOG.md")
    )
    return Tree(
        project,
        chart,
        changelog=changelog,
        changed=[line[3:] for line in git("status", "--porcelain").splitlines()],
        elsewhere=sorted(set(git("tag", "--list").split()) - set(git("tag", "--points-at", "HEAD").split())),
        released=surfaces_before(version_of(project)),
        surfaces={name: Path(name).read_text() for name in SURFACES},
        constraints=Path(PINS).read_text(),
        lock=Path(LOCK).read_text(),
    )


def surfaces_before(version: str) -> dict[str, str]:
    """As the newest tag of another version that this commit comes after has them; none without such a tag."""
    tags = git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname").split()
    before = next((tag for tag in tags if tag != f"v{version}"), None)
    if before is None:
        return {}
    there = git("ls-tree", "--name-only", before, "--", *SURFACES).split()
    return {name: git("show", f"{before}:{name}") for name in there}


def export(commit: str, target: Path) -> Path:
    """What the commit holds, and nothing else that lies in this checkout."""
    target.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "--format=tar", commit], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", target], input=archive, check=True)
    return target


def build_once(commit: str, room: Path, programs: Programs, parts: list[str]) -> Path:
    """One build in a folder of its own; returns where its files lie."""
    source, out = export(commit, room / "source"), room / "out"
    out.mkdir()
    version = version_of((source / "pyproject.toml").read_text())
    epoch = int(git("show", "--no-patch", "--format=%ct", commit))
    build = Build(source, out, version=version, epoch=epoch, programs=programs)
    if "packages" in parts:
        build.packages()
    if "chart" in parts:
        build.chart()
    if "bill" in parts:
        build.bill()
    for role in ROLES if "images" in parts else ():
        build.image(role)
    return out


def build_twice(commit: str, out: Path, programs: Programs, parts: list[str]) -> None:
    """Both builds, compared; raises BuildError where a byte differs, and leaves both to be looked into."""
    rooms = [out.with_name(f"{out.name}-{name}-build") for name in ("first", "second")]
    for old in (out, *rooms):
        shutil.rmtree(old, ignore_errors=True)
    first, second = (build_once(commit, room.absolute(), programs, parts) for room in rooms)
    if differing := differences(first, second):
        raise BuildError(f"not the same bytes in both builds: {', '.join(differing)}; they lie in {first} and {second}")
    first.rename(out)
    write_sums(out)
    for room in rooms:
        shutil.rmtree(room)
    print((out / SUMS).read_text(), end="")


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="release")
    verbs = command.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check")
    build = verbs.add_parser("build")
    build.add_argument("--commit", default="HEAD")
    build.add_argument("--out", type=Path, default=Path("dist/release"))
    build.add_argument("--parts", nargs="+", choices=["packages", "chart", "bill", "images"], required=True)
    build.add_argument("--helm", default="helm")
    build.add_argument("--buildah", default="buildah")
    build.add_argument("--image-options", default="")
    of_files = signing, _ = verbs.add_parser("sign"), verbs.add_parser("verify")
    of_images = signing_images, _ = verbs.add_parser("sign-images"), verbs.add_parser("verify-images")
    for verb in (*of_files, *of_images):
        verb.add_argument("folder", type=Path)
        verb.add_argument("--version", required=True)
        verb.add_argument("--signers", type=Path, required=True)
    for verb in of_files:
        verb.add_argument("--keyring", type=Path, required=True)
    for verb in of_images:
        verb.add_argument("--home", required=True)
        verb.add_argument("--public", type=Path, required=True)
        verb.add_argument("--cosign", default="cosign")
    signing.add_argument("--key", type=Path, required=True)
    signing.add_argument("--pgp-key", required=True)
    signing_images.add_argument("--key", required=True)
    return command


def check() -> int:
    tree = tree_here()
    found = refusals(tree)
    for line in [*found, *notes(tree)]:
        print(line, file=sys.stderr)
    return NO_RELEASE if found else 0


def build(given: argparse.Namespace) -> int:
    if "images" in given.parts and (found := base_refusals(shlex.split(given.image_options))):
        print(*found, sep="\n", file=sys.stderr)
        return NO_RELEASE
    try:
        build_twice(given.commit, given.out, Programs(given.helm, given.buildah, given.image_options), given.parts)
    except (BuildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def signature(given: argparse.Namespace) -> int:
    """Signs or verifies."""
    try:
        if "images" in given.verb:
            print(of_images(given))
            return 0
        if given.verb == "sign":
            sign(given.folder, given.version, given.key, given.signers)
            sign_chart(given.folder, given.version, given.pgp_key, given.keyring)
        missing = verify(given.folder, given.version, given.signers)
        package = given.folder / provenance_name(given.version).removesuffix(".prov")
        if package.exists() or (given.folder / provenance_name(given.version)).exists():
            verify_chart(given.folder, given.version, given.keyring)
    except (NotVerified, OSError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return NOT_SIGNED
    print(f"{given.folder}: what lies here is PolyRL {given.version} as signed by a key of {given.signers}")
    if missing:
        print(f"signed, and not here: {', '.join(missing)}")
    return 0


def of_images(given: argparse.Namespace) -> str:
    """Signs or verifies those of a registry; gives the closing line."""
    which = {"home": given.home, "public": given.public, "cosign": given.cosign}
    if given.verb == "sign-images":
        sign_images(given.folder, given.version, given.signers, key=given.key, **which)
    else:
        verify_images(given.folder, given.version, given.signers, **which)
    return f"{given.home}: has the images of PolyRL {given.version}, signed by {given.public}"


def main() -> int:
    given = parser().parse_args()
    if given.verb == "check":
        return check()
    return build(given) if given.verb == "build" else signature(given)


if __name__ == "__main__":
    sys.exit(main())
