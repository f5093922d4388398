"""Whether a tree may be released: its version, its changelog, its tags, what users rely on, its lock.
Pure.

The version stands in pyproject.toml, and `polyrl --version` is what was installed from there. A chart needs a version
of its own and one of what it installs; both are the project's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from release.lock import lock_refusals
from release.surfaces import removals

PLAIN = re.compile(r"\d+\.\d+\.\d+")
"""Python's and Helm's ways to write a pre-release differ, so there is none: three numbers mean the same in both."""
ENTRY = re.compile(r"^- \S", re.MULTILINE)
BASE_BY_DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
SHOWN = 5
"""Changed files that a refusal names; the first ones say what was forgotten."""


@dataclass(frozen=True)
class Tree:
    """The texts and facts that a release goes by."""

    pyproject: str
    chart: str
    changelog: str
    changed: Sequence[str] = ()
    """Files that differ from the commit, or that no commit holds."""
    elsewhere: Sequence[str] = ()
    """Tags of other commits."""
    released: Mapping[str, str] = field(default_factory=dict)
    """Surfaces of the version before, by file; empty before the first release."""
    surfaces: Mapping[str, str] = field(default_factory=dict)
    constraints: str = ""
    lock: str = ""


def version_of(pyproject: str) -> str:
    return str(tomllib.loads(pyproject)["project"]["version"])


def refusals(tree: Tree) -> list[str]:
    """One sentence for each reason why this tree is no release; none if it is one."""
    version = version_of(tree.pyproject)
    sections = sections_of(tree.changelog).items()
    announced = "".join(_removed(text) for title, text in sections if title.startswith(f"[{version}]"))
    return [
        *_of_version(tree, version),
        *_of_changelog(tree.changelog, version),
        *removals(tree.released, tree.surfaces, announced),
        *lock_refusals(tree.pyproject, tree.constraints, tree.lock),
        *_of_changes(tree.changed),
    ]


def base_refusals(image_options: Sequence[str]) -> list[str]:
    """Why images built with these options would not be a release's: a tag may mean another base image tomorrow."""
    given = [option.removeprefix("--build-arg=") for option in image_options]
    bases = [option.removeprefix("BASE=") for option in given if option.startswith("BASE=")]
    return [
        f"BASE is {base}; name the base image by its digest, as BASE=docker.io/library/python@sha256:... (64 digits)"
        for base in bases or ["not given"]
        if not BASE_BY_DIGEST.fullmatch(base)
    ]


def notes(tree: Tree) -> list[str]:
    """What a release may lack, and its publication should not."""
    if "urls" in tomllib.loads(tree.pyproject)["project"]:
        return []
    return ["note: pyproject.toml has no [project.urls]; say where source and issues are before anything is uploaded"]


def _of_version(tree: Tree, version: str) -> list[str]:
    chart = yaml.safe_load(tree.chart)
    found = [
        f"charts/polyrl/Chart.yaml: {field} is {chart[field]}, pyproject.toml has {version}; make them equal"
        for field in ("version", "appVersion")
        if str(chart[field]) != version
    ]
    if not PLAIN.fullmatch(version):
        found.append(f"pyproject.toml: version is {version}; a release has three numbers, as 0.1.0")
    if f"v{version}" in tree.elsewhere:
        found.append(f"tag v{version} belongs to another commit; raise the version")
    return found


def _of_changelog(changelog: str, version: str) -> list[str]:
    sections = sections_of(changelog)
    found = []
    section = next((title for title in sections if title.startswith(f"[{version}]")), None)
    if section is None:
        found.append(f"CHANGELOG.md: no section [{version}]; head what is under [Unreleased] with it and the date")
    elif not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", section):
        found.append(f"CHANGELOG.md: the section is headed {section}; write [{version}] - YEAR-MONTH-DAY")
    elif not ENTRY.search(sections[section]):
        found.append(f"CHANGELOG.md: the section [{version}] is empty; name what changed for users")
    if section is not None and ENTRY.search(sections.get("[Unreleased]", "")):
        found.append(f"CHANGELOG.md: [Unreleased] has entries; they belong to [{version}], which holds this commit")
    return found


def sections_of(changelog: str) -> dict[str, str]:
    """What stands under each heading of the second level."""
    parts = re.split(r"^## (.+?)\s*$", changelog, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _removed(section: str) -> str:
    """What the section says of what went."""
    return "".join(re.findall(r"^### Removed\s*$(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL))


def _of_changes(changed: Sequence[str]) -> list[str]:
    if not changed:
        return []
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return [f"the tree differs from its commit: {', '.join(changed[:SHOWN])}{more}; commit or remove that"]
