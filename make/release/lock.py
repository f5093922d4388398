"""constraints.lock: each pinned version with the SHA-256 of every file that an index had of it. Pure.

Images and releases install by it: what an index serves under a pinned version and did not have then is refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = "constraints.lock"
PINS = "constraints.txt"
PIN = re.compile(r"[a-z0-9][a-z0-9-]*==[\w.+!]+")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
APART = {"sglang"}
"""Extras that are installed into environments of their own, and are pinned by nothing here."""


class NotLocked(Exception):
    """A package that is installed, and that the lock does not have in this version."""


def entries_of(text: str) -> list[list[str]]:
    """The words of each line, continued ones taken together: a pin, then its hashes."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


def select(lock: str, pins: Iterable[str]) -> str:
    """The lock's lines of these `name==version`; raises NotLocked for one that it does not have."""
    known = {pin: hashes for pin, *hashes in entries_of(lock)}
    chosen = []
    for pin in pins:
        name, _, version = pin.partition("==")
        normal = f"{canonicalize_name(name)}=={version}"
        if normal not in known:
            raise NotLocked(f"{LOCK} has no {normal}, which is installed; `make lock` writes it for {PINS}")
        chosen.append(" ".join([normal, *known[normal]]) + "\n")
    return "".join(chosen)


def lock_refusals(pyproject: str, constraints: str, lock: str) -> list[str]:
    """One sentence for each way in which the lock holds less than a hash of every file of every pin, or other pins."""
    locked, pinned = entries_of(lock), [words[0] for words in entries_of(constraints)]
    names = [words[0] for words in locked]
    found = [sentence for words in locked for sentence in _of_entry(words)]
    found += [f"{LOCK}: {name} stands there twice; `make lock` writes it" for name in _twice(names)]
    found += [f"{LOCK}: {pin} of {PINS} is not in it; `make lock` writes it" for pin in pinned if pin not in names]
    found += [f"{LOCK}: {PINS} has no {name}; `make lock` writes it" for name in names if name not in pinned]
    return found + list(_beyond(pyproject, pinned))


def _of_entry(words: list[str]) -> Iterator[str]:
    pin, *hashes = words
    if not PIN.fullmatch(pin):
        yield f"{LOCK}: {pin} is no name==version; `make lock` writes it"
    elif not hashes:
        yield f"{LOCK}: {pin} has no hash; `make lock` writes it"
    for each in hashes:
        if not HASH.fullmatch(each):
            yield f"{LOCK}: {pin} has {each}; a hash is --hash=sha256: and 64 digits"


def _twice(pins: list[str]) -> list[str]:
    names = [pin.partition("==")[0] for pin in pins]
    return sorted({name for name in names if names.count(name) > 1})


def _beyond(pyproject: str, pinned: list[str]) -> Iterator[str]:
    """Requirements that the pins do not fulfil."""
    project = tomllib.loads(pyproject)["project"]
    extras = project.get("optional-dependencies", {}).items()
    lists = [project.get("dependencies", []), *(lines for extra, lines in extras if extra not in APART)]
    versions = dict(pin.split("==") for pin in pinned)
    for requirement in {line: Requirement(line) for lines in lists for line in lines}.values():
        name = canonicalize_name(requirement.name)
        fits = name in versions and requirement.specifier.contains(versions[name], prereleases=True)
        if not fits and name != project["name"]:
            yield f"{PINS}: {requirement} of pyproject.toml is not pinned; `make constraints` writes it"
