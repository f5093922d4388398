"""Builds what a release is made of, from one export of a commit into one folder.

Everything that could differ from build to build is held: times by SOURCE_DATE_EPOCH, which hatchling, Helm 4 and
cyclonedx-py go by and buildah gets as an option; the order and owners of an archive's files by tar's options.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from release.lock import LOCK, PINS, NotLocked, select

ROLES = ("operator", "manager", "rollout", "trainer")
EXTRA = "all"
"""The bill of materials is of `pip install polyrl[all]`; an image has one of what lies in it."""
SUMS = "SHA256SUMS"
INSTALLED = """
from importlib.metadata import distributions
print(*sorted({f"{each.name}=={each.version}" for each in distributions() if each.name != "polyrl"}), sep="\\n")
"""
"""Run by an image's own Python. The bill's root is polyrl, so it is no part of itself."""


class BuildError(Exception):
    """A program failed; its output has been shown."""


@dataclass(frozen=True)
class Programs:
    """Commands that may need others before them, as `nice helm`."""

    helm: str
    buildah: str
    image_options: str = ""
    """For the builds of the images, as `--build-arg VARIANT=cpu`."""


@dataclass(frozen=True)
class Build:
    """One build: where from, where to, by what."""

    source: Path
    out: Path
    version: str
    epoch: int
    programs: Programs

    def run(self, *command: str | Path, text: str | None = None) -> str:
        """Standard output. Each program gets the commit's time, and none this one's PYTHONPATH."""
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(self.epoch), "PYTHONHASHSEED": "0"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, cwd=self.source, env=environment, input=text, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(done.stdout, file=sys.stderr)
            raise BuildError(f"{' '.join(map(str, command[:4]))} ... ended with {done.returncode}")
        return done.stdout

    def packages(self) -> None:
        """The sdist, and the wheel out of it: so the sdist has all that the wheel is made of."""
        self.run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", self.out, self.source)

    def chart(self) -> None:
        self.run(*shlex.split(self.programs.helm), "package", self.source / "charts/polyrl", "--destination", self.out)

    def bill(self) -> None:
        """What `pip install` brings, each file of it by its hash of the lock, as CycloneDX."""
        options = ["--extra", EXTRA, "-c", PINS, "--python-version", "3.11", "-q"]
        options += ["--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links"]
        pinned = self.run(Path(sys.executable).with_name("uv"), "pip", "compile", *options, "pyproject.toml")
        self._write_bill(pinned.split(), f"polyrl-{self.version}.cdx.json", kind="library")

    def _write_bill(self, pins: list[str], name: str, *, kind: str) -> None:
        try:
            requirements = select((self.source / LOCK).read_text(), pins)
        except NotLocked as error:
            raise BuildError(str(error)) from None
        command = ["requirements", "--pyproject", "pyproject.toml", "--mc-type", kind, "--output-reproducible"]
        program = Path(sys.executable).with_name("cyclonedx-py")
        self.run(program, *command, "--output-file", self.out / name, "-", text=requirements)

    def image(self, role: str) -> None:
        """The image as an archive in the OCI layout, the digest that registries will serve it by, and what Python has
        installed in it."""
        buildah, reference = shlex.split(self.programs.buildah), f"localhost/polyrl-{role}:{self.version}"
        # With layers, so that a version whose dependencies are those of the one before moves only its own code.
        options = ["--layers", "--no-cache", "--timestamp", str(self.epoch), "--format", "oci", "--quiet"]
        options += shlex.split(self.programs.image_options)
        identity = self.run(*buildah, "bud", *options, "-t", reference, "-f", f"images/{role}/Dockerfile", ".").strip()
        name = f"polyrl-{role}-{self.version}"
        layout = self.out / name
        self.run(*buildah, "push", "--quiet", identity, f"oci:{layout}:{self.version}")
        with (self.out / images_name(self.version)).open("a") as digests:
            digests.write(f"{manifest_digest(layout)}  {role}\n")
        sorted_tar = ["--sort=name", f"--mtime=@{self.epoch}", "--owner=0", "--group=0", "--numeric-owner"]
        modes = ["--mode=u=rwX,go=rX", "--remove-files"]
        self.run("tar", *sorted_tar, *modes, "-cf", self.out / f"{name}.oci.tar", "-C", layout, ".")
        container = self.run(*buildah, "from", "--pull-never", identity).strip()
        try:
            installed = self.run(*buildah, "run", container, "--", "python", "-c", INSTALLED)
        finally:
            self.run(*buildah, "rm", container)
        self._write_bill(installed.split(), f"{name}.cdx.json", kind="application")


def images_name(version: str) -> str:
    """The file that lists the images' digests."""
    return f"polyrl-{version}.images"


def manifest_digest(layout: Path) -> str:
    """Of the one image that lies in an OCI layout, as `sha256:...`."""
    (manifest,) = json.loads((layout / "index.json").read_text())["manifests"]
    return str(manifest["digest"])


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """As `sha256sum --check` reads it."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    (folder / SUMS).write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))


def differences(first: Path, second: Path) -> list[str]:
    """Names of files that are not the same bytes in both folders, or in one of them only."""
    names = {path.name for folder in (first, second) for path in folder.iterdir()}
    return sorted(name for name in names if not _equal(first / name, second / name))


def _equal(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and digest(one) == digest(other)
