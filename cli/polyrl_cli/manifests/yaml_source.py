"""YAML with lines: what a file says, and on which line each field stands.

PyYAML composes nodes, which know their lines, and does not load them: so a key that stands twice is found too. Scalars
are read as kubectl reads them: `1e-6` is a number and `2026-01-01` is text, other than in plain PyYAML. Tags beyond
plain data and files larger than an API server would take are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from polyrl.errors import InvalidManifest

FieldPath = tuple[str | int, ...]

MAX_BYTES: Final = 1 << 20
"""An API server takes objects of 1.5 MiB at most; a manifest near it is another file."""

MAX_VALUES: Final = 20_000
"""Values, also after aliases are expanded: many times a large manifest, read in about a second, and far below what an
alias bomb makes."""

MAX_KEY_CHARS: Final = 512
"""Kubernetes' own longest keys, those of annotations, have 317."""

MAX_FAULTS: Final = 100
"""Shown; nobody mends more at once, and each costs a search for the name that was meant."""

MAX_DEPTH: Final = 64
"""Pod templates, the deepest part, need about 15."""

MAX_INTEGER_DIGITS: Final = 40
"""Longer ones are read as floats: they are out of every bound, and Python refuses to print them."""

_PLAIN: Final = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", list("yYnNtTfFoO")),
    ("int", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)

_TOO_MANY: Final = f"has more than {MAX_VALUES:,} values, those of expanded aliases among them"

_TAG: Final = "tag:yaml.org,2002:"

_HINTS: Final = (
    ("expected a single document", "a second document starts here; a file holds one manifest"),
    ("cannot start any token", "this character cannot start a value; indent with spaces, not tabs, and quote the text"),
    ("mapping values are not allowed", "a colon cannot stand here; check the indentation, or quote the text"),
    ("could not find expected ':'", "a key without its colon; write `key: value`"),
    ("undefined alias", "an alias (*) to an anchor (&) that is not there"),
    ("<stream end>", "the file ends inside a bracket or brace"),
    ("expected ',' or", "a bracket or brace is not closed, or a comma is missing"),
    ("expected <block end>", "the indentation does not fit the lines above"),
    ("while scanning a quoted scalar", "a quote is not closed"),
)


class _TooMany(Exception):
    """More values than a manifest has."""


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own protocol: a class-wide table
    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Ends with the first value too many, before the rest is read."""
        self._nodes += 1
        # A key is a node too.
        if self._nodes > 2 * MAX_VALUES:
            raise _TooMany
        return super().compose_node(parent, index)


for _name, _pattern, _first in _PLAIN:
    _Reader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class ManifestFault:
    """One thing that is wrong, at one field."""

    field: FieldPath
    sentence: str


@dataclass
class ManifestSource:
    """The plain data of one YAML text, and the line of each path."""

    name: str
    """File as the user wrote it."""
    data: Any = None
    lines: dict[FieldPath, int] = field(default_factory=dict)
    overridden: set[FieldPath] = field(default_factory=set)
    """Paths whose value comes from the command line."""

    def describe(self, faults: Sequence[ManifestFault]) -> list[str]:
        """Ready-to-print lines in file order, each with the file and line of the field, or of what it is missing in, or
        with the flag that set it; what the command line set comes last."""
        placed = []
        for fault in faults:
            ways = [fault.field[:length] for length in range(len(fault.field), -1, -1)]
            line = next((self.lines[way] for way in ways if way in self.lines), 0)
            overridden = any(way in self.overridden for way in ways)
            place = "--set" if overridden else f"{self.name}:{line or 1}"
            text = f"{place} {path_text(fault.field)}: {fault.sentence}"
            # What cannot be printed as it is, a line break in a field's name for one, is shown as an escape.
            printable = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
            placed.append((overridden, line, printable))
        return [text for _, _, text in sorted(placed, key=lambda one: one[:2])]


def path_text(path: FieldPath) -> str:
    """`spec.recipe.data.rl[0].path`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def read_source(file: Path) -> ManifestSource:
    """The file's one document. Raises InvalidManifest for whatever keeps it from being read."""
    try:
        if not file.is_file():
            raise InvalidManifest([f"{file}: {_what_else(file)}"])
        size = file.stat().st_size
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidManifest([f"{file}: cannot be read ({error.strerror})"]) from error
    if len(content) > MAX_BYTES:
        raise InvalidManifest([f"{file}: has {max(size, len(content)):,} bytes; a manifest has at most {MAX_BYTES:,}"])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidManifest([f"{file}: is not text in UTF-8 (byte {error.start} cannot be read)"]) from error
    return parse(text, str(file))


def _what_else(file: Path) -> str:
    if file.is_dir():
        return "is a folder; name the file"
    return "is a pipe, socket or device; name a file" if file.exists() else "no such file"


def few(lines: Sequence[str]) -> list[str]:
    """As many faults as are shown, and that there are more."""
    more = [f"and more: the first {MAX_FAULTS} faults are shown"] if len(lines) > MAX_FAULTS else []
    return [*lines[:MAX_FAULTS], *more]


def parse(text: str, name: str) -> ManifestSource:
    """The text's one document as plain data with lines. Raises InvalidManifest with every fault of form."""
    try:
        root = yaml.compose(text, Loader=_Reader)
        walk = _PlainData(name)
        data = walk.value(root, ()) if root is not None else None
    except yaml.reader.ReaderError as error:
        raise InvalidManifest([f"{name}: holds the character #x{error.character:04x}, which no text has"]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        found = f"{error.context or ''}; {error.problem or ''}"
        hint = next((hint for sign, hint in _HINTS if sign in found), error.problem or "it cannot be read")
        raise InvalidManifest([f"{name}:{mark.line + 1 if mark else 1} is not valid YAML: {hint}"]) from error
    except _TooMany as error:
        raise InvalidManifest([f"{name}: {_TOO_MANY}"]) from error
    except RecursionError as error:
        raise InvalidManifest([f"{name}: is nested too deeply"]) from error
    if walk.faults:
        raise InvalidManifest(few([f"{name}:{line} {sentence}" for line, sentence in sorted(walk.faults)]))
    return ManifestSource(name, data, lines=walk.lines)


class _PlainData:
    """Turns composed nodes into plain data; collects lines and faults."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[FieldPath, int] = {}
        self.faults: list[tuple[int, str]] = []
        self._values = 0
        self._chars = 0

    def value(self, node: yaml.Node, path: FieldPath) -> Any:
        """Plain data of a node and all below it. Raises InvalidManifest for alias bombs and loops."""
        self._count()
        if len(path) > MAX_DEPTH:
            raise InvalidManifest([f"{self.name}: is nested deeper than {MAX_DEPTH}, or an alias holds itself"])
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _count(self) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _TooMany

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        made: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{_TAG}merge":
                for part in self._merged(value_node, line):
                    merged = self._mapping(part, path) | merged
            elif not isinstance(key_node, yaml.ScalarNode):
                self.faults.append((line, f"{path_text(path)}: a key must be plain text"))
            elif len(key_node.value) > MAX_KEY_CHARS:
                fault = f"a key has {len(key_node.value):,} characters; {MAX_KEY_CHARS} are allowed"
                self.faults.append((line, f"{path_text(path)}: {fault}"))
            elif key_node.value in first:
                below = path_text((*path, key_node.value))
                self.faults.append((line, f"{below}: stands twice; the first is on line {first[key_node.value]}"))
            else:
                first[key_node.value] = self.lines[(*path, key_node.value)] = line
                made[key_node.value] = self.value(value_node, (*path, key_node.value))
        return merged | made

    def _merged(self, node: yaml.Node, line: int) -> Iterator[yaml.MappingNode]:
        """The mappings that `<<` names."""
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(part, yaml.MappingNode):
                # Mappings of nothing but merges have no value that would be counted, and double with each line.
                self._count()
                yield part
            else:
                self.faults.append((line, "<<: merges fields (an alias to a mapping), nothing else"))

    def _scalar(self, node: yaml.Node, path: FieldPath) -> Any:
        kind, text = node.tag.removeprefix(_TAG), str(node.value)
        self._chars += len(text)
        if self._chars > MAX_BYTES:
            # One text of many aliases is little here, and gigabytes where the job is written.
            raise InvalidManifest(
                [f"{self.name}: has more than {MAX_BYTES:,} characters once its aliases are expanded"]
            )
        try:
            return _SCALARS[kind](text)
        except (KeyError, ValueError):
            shown = node.tag if kind == node.tag else f"!!{kind}"
            fault = f"{path_text(path)}: {text[:40]!r} cannot be read with tag {shown}"
            self.faults.append((node.start_mark.line + 1, fault))
            return None


def _integer(text: str) -> int | float:
    plain = text.replace("_", "")
    return int(plain, 0) if len(plain) <= MAX_INTEGER_DIGITS else float(plain)


_SCALARS: Final[dict[str, Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() in ("yes", "true", "on"),
    "int": _integer,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
    "merge": str,
}
