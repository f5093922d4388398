"""What is wrong with a field, as a sentence in the manifest's own words: what was found, and what would be right.

A kind of pydantic's findings that is not listed here keeps pydantic's wording, which is correct if less kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, Final

from pydantic_core import ErrorDetails

from polyrl.manifest.job import RULE_ERROR
from polyrl.manifest.schema.crd import OPEN, Schema, manifest_schema
from polyrl_cli.manifests.yaml_source import FieldPath, path_text

MAX_SHOWN: Final = 40
"""Characters of a wrong value that are repeated; enough to recognise it."""

MAX_GUESSES: Final = 4
"""Fields of one name that are offered together; as many stages have steps and a learning rate."""

MAX_LISTED: Final = 12
"""Names listed when no known field is close to a misspelt one."""

_BARE: Final = (
    "is no place without credentials; write it as {}, without user:password@, ?, # and ::, and give accounts by"
    " environment variables of a Secret"
)

_SHAPES: Final = {
    "function": "is not of the form module:function",
    "filterFunction": "is not of the form module:function",
    "lossFunction": "is not of the form module:function",
    "advantageFunction": "is not of the form module:function",
    "classPath": "is not of the form module:Class",
    "currency": "is not three capital letters, as USD",
    "cidr": "is not an address range, as 10.0.0.0/8",
    "path": _BARE.format("s3://BUCKET/PLACE"),
    "uri": _BARE.format("s3://BUCKET/PLACE, gs://BUCKET/PLACE or file:///PLACE"),
    "trackingUri": _BARE.format("http://mlflow:5000"),
    "name": "may only hold lower case letters, digits and dashes, and begins and ends with a letter or digit",
}
"""What a field's pattern means, by the field's name."""

_UNSHOWN: Final = frozenset({"path", "uri", "trackingUri"})
"""Fields whose wrong value may be a credential, which no terminal and no log of a CI should show."""


def sentence(error: ErrorDetails, path: FieldPath) -> str:
    """What is wrong with the field at `path`, reading on from its name."""
    text = _SENTENCES.get(error["type"])
    if isinstance(text, str):
        limits = {name: shown(limit) for name, limit in error.get("ctx", {}).items()}
        return text.format(given=shown(error["input"]), **limits)
    return text(error, path) if text else error["msg"][:1].lower() + error["msg"][1:]


def shown(value: Any) -> str:
    """A wrong value as the user wrote it, shortened."""
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 3] + "...")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else str(value)


def node_at(path: FieldPath) -> Schema | None:
    """Schema of the field, {} inside an open object, None when there is no such field."""
    node = manifest_schema()
    for key in path:
        child = node.get("items") if isinstance(key, int) else node.get("properties", {}).get(key)
        if child is None:
            return {} if OPEN in node or node == {} else None
        node = child
    return node


def unknown_field(path: FieldPath) -> tuple[str, FieldPath | None]:
    """Sentence for a field that does not exist, and the field that was probably meant."""
    parent, name = path[:-1], _plain(path[-1])
    siblings = sorted((node_at(parent) or {}).get("properties", {}))
    plain = {_plain(key): key for key in siblings}
    # A name that is right in another place is meant before one that only looks alike here.
    nearest = [] if name in plain else _same_name(parent, name)
    if len(nearest) == 1:
        return f"unknown field; did you mean {path_text(nearest[0])}?", nearest[0]
    if not nearest and (close := difflib.get_close_matches(name, plain, n=1)):
        return f"unknown field; did you mean {plain[close[0]]}?", (*parent, plain[close[0]])
    if 0 < len(nearest) <= MAX_GUESSES:
        return f"unknown field; did you mean {' or '.join(map(path_text, nearest))}?", None
    first = next(path[:end] for end in range(1, len(path) + 1) if node_at(path[:end]) is None)
    if first != path:
        return f"unknown field; there is no {path_text(first)}, {unknown_field(first)[0].partition('; ')[2]}", None
    if "items" in (node_at(parent) or {}):
        return f"unknown field; {path_text(parent)} is a list, whose elements are [0], [1] ...", None
    listed = ", ".join(siblings[:MAX_LISTED]) + (", ..." if len(siblings) > MAX_LISTED else "")
    return (f"unknown field; known here: {listed}" if siblings else "unknown field; nothing stands below this"), None


def _plain(name: str | int) -> str:
    return str(name).lower().replace("_", "")


def _same_name(parent: FieldPath, name: str) -> list[FieldPath]:
    """Fields of that name: those nearest below where it was written, else those nearest to the top."""
    found = [known for known in _all_fields(manifest_schema(), ()) if _plain(known[-1]) == name]
    outside = [known for known in found if known[0] != "status"]
    below = [known for known in outside if parent and known[: len(parent)] == parent]
    wanted = below or outside
    return sorted((known for known in wanted if len(known) == min(map(len, wanted))), key=path_text)


def _all_fields(node: Schema, path: FieldPath) -> Iterator[FieldPath]:
    for name, child in node.get("properties", {}).items():
        yield (*path, name)
        yield from _all_fields(child, (*path, name))


def _integer(error: ErrorDetails, path: FieldPath) -> str:
    given = error["input"]
    if isinstance(given, str) and given.strip().lstrip("+-").isdecimal():
        return f"{shown(given)} is text; write the number without quotes"
    return f"{shown(given)} is not a whole number"


def _text(error: ErrorDetails, path: FieldPath) -> str:
    given = shown(error["input"])
    if isinstance(error["input"], list | dict):
        return f"needs text, not {given}"
    return f"{given} is not text; put it in quotes, as it stands there"


def _choice(error: ErrorDetails, path: FieldPath) -> str:
    choices = [str(choice) for choice in (node_at(path) or {}).get("enum", [])]
    plain = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(str(error["input"]).lower(), plain, n=1)
    hint = f"; did you mean {plain[close[0]]}?" if close and len(choices) > 1 else ""
    return f"{shown(error['input'])} is not {' or '.join(choices)}{hint}"


def _missing(error: ErrorDetails, path: FieldPath) -> str:
    meaning = (node_at(path) or {}).get("description", "").partition(". ")[0].removesuffix(".")
    return f"is required ({meaning[:1].lower()}{meaning[1:]})" if meaning else "is required"


def _shape(error: ErrorDetails, path: FieldPath) -> str:
    name = str(path[-1])
    right = _SHAPES.get(name, "has not the right form")
    return right if name in _UNSHOWN else f"{shown(error['input'])} {right}"


def _entries(error: ErrorDetails, path: FieldPath) -> str:
    have = len(error["input"]) if isinstance(error["input"], list) else 0
    return f"has {have} {'entry' if have == 1 else 'entries'}; {_limit(error)} needed"


def _length(error: ErrorDetails, path: FieldPath) -> str:
    have = len(error["input"])
    return "is empty" if have == 0 else f"has {have} characters; {_limit(error)} are allowed"


def _limit(error: ErrorDetails) -> str:
    limits = error["ctx"]
    return f"at least {limits['min_length']}" if "min_length" in limits else f"at most {limits['max_length']}"


_FIELDS: Final = "needs fields (key: value), not {given}"
_LIST: Final = "needs a list (lines that begin with -, or [...]), not {given}"
_SENTENCES: Final[dict[str, str | Callable[[ErrorDetails, FieldPath], str]]] = {
    RULE_ERROR: lambda error, path: error["msg"],
    "value_error": lambda error, path: str(error["ctx"]["error"]),
    "missing": _missing,
    "int_type": _integer,
    "int_from_float": _integer,
    "float_type": "{given} is not a number",
    "finite_number": "{given} is not a finite number",
    "bool_type": "{given} is not true or false",
    "string_type": _text,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": _FIELDS,
    "model_type": _FIELDS,
    "greater_than_equal": "{given} is less than the least allowed, {ge}",
    "less_than_equal": "{given} is more than the most allowed, {le}",
    "greater_than": "{given} is not more than {gt}",
    "less_than": "{given} is not less than {lt}",
    "string_pattern_mismatch": _shape,
    "string_too_short": _length,
    "string_too_long": _length,
    "too_short": _entries,
    "too_long": _entries,
    "literal_error": _choice,
    "enum": _choice,
}
"""By pydantic's type of the error; `given` is the wrong value, the other names are pydantic's limits."""
