"""pydantic's findings as sentences for the person who wrote the manifest.

Each sentence says what was found and what would be right, in the manifest's own words. A kind of finding that is not
listed here keeps pydantic's wording, which is correct if less kind. Read next: `manifest_file`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Final

from pydantic_core import ErrorDetails

from polyrl.manifest.job import RULE_ERROR
from polyrl_cli.manifests.fields import node_at
from polyrl_cli.manifests.yaml_source import FieldPath

MAX_SHOWN: Final = 40
"""Characters of a wrong value that are repeated; enough to recognise it."""

_SHAPES: Final = {
    "function": "is not of the form module:function",
    "filterFunction": "is not of the form module:function",
    "classPath": "is not of the form module:Class",
    "currency": "is not three capital letters, as USD",
    "url": "is not an http:// or https:// address",
    "cidr": "is not an address range, as 10.0.0.0/8",
    "name": "may only hold lower case letters, digits and dashes, and begins and ends with a letter or digit",
}
"""What a field's pattern means, by the field's name."""


def sentence(error: ErrorDetails, path: FieldPath) -> str:
    """What is wrong with the field at `path`, reading on from its name."""
    say = _SAY.get(error["type"])
    return say(error, path) if say else error["msg"][:1].lower() + error["msg"][1:]


def shown(value: Any) -> str:
    """A wrong value as the user wrote it, shortened."""
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 3] + "...")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else str(value)


def _number_for_integer(error: ErrorDetails, path: FieldPath) -> str:
    given = error["input"]
    if isinstance(given, str) and given.strip().lstrip("+-").isdecimal():
        return f"{shown(given)} is text; write the number without quotes"
    return f"{shown(given)} is not a whole number"


def _text(error: ErrorDetails, path: FieldPath) -> str:
    given = error["input"]
    if isinstance(given, list | dict):
        return f"needs text, not {shown(given)}"
    return f'{shown(given)} is not text; put it in quotes: "{shown(given)}"'


def _choice(error: ErrorDetails, path: FieldPath) -> str:
    choices = [str(choice) for choice in (node_at(path) or {}).get("enum", [])]
    given = error["input"]
    plain = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(str(given).lower(), plain, n=1)
    hint = f"; did you mean {plain[close[0]]}?" if close and len(choices) > 1 else ""
    return f"{shown(given)} is not {' or '.join(choices)}{hint}"


def _shape(error: ErrorDetails, path: FieldPath) -> str:
    meaning = _SHAPES.get(str(path[-1]), "has not the right form")
    return f"{shown(error['input'])} {meaning}"


def _missing(error: ErrorDetails, path: FieldPath) -> str:
    meaning = (node_at(path) or {}).get("description", "").partition(". ")[0].removesuffix(".")
    return f"is required ({meaning[:1].lower()}{meaning[1:]})" if meaning else "is required"


def _entries(relation: str, limit: str) -> Callable[[ErrorDetails, FieldPath], str]:
    def say(error: ErrorDetails, path: FieldPath) -> str:
        have = len(error["input"]) if isinstance(error["input"], list) else 0
        return f"has {have} {'entry' if have == 1 else 'entries'}; {relation} {error['ctx'][limit]} needed"

    return say


def _length(relation: str, limit: str) -> Callable[[ErrorDetails, FieldPath], str]:
    def say(error: ErrorDetails, path: FieldPath) -> str:
        have = len(error["input"])
        return "is empty" if have == 0 else f"has {have} characters; {relation} {error['ctx'][limit]} are allowed"

    return say


def _bound(text: str, limit: str) -> Callable[[ErrorDetails, FieldPath], str]:
    return lambda error, path: f"{shown(error['input'])} is {text} {shown(error['ctx'][limit])}"


def _needs(what: str) -> Callable[[ErrorDetails, FieldPath], str]:
    return lambda error, path: f"needs {what}, not {shown(error['input'])}"


_FIELDS: Final = _needs("fields (key: value)")
_LIST: Final = _needs("a list (lines that begin with -, or [...])")
_SAY: Final[dict[str, Callable[[ErrorDetails, FieldPath], str]]] = {
    RULE_ERROR: lambda error, path: error["msg"],
    "value_error": lambda error, path: str(error["ctx"]["error"]),
    "missing": _missing,
    "int_type": _number_for_integer,
    "int_from_float": _number_for_integer,
    "float_type": lambda error, path: f"{shown(error['input'])} is not a number",
    "finite_number": lambda error, path: f"{shown(error['input'])} is not a finite number",
    "bool_type": lambda error, path: f"{shown(error['input'])} is not true or false",
    "string_type": _text,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": _FIELDS,
    "model_type": _FIELDS,
    "greater_than_equal": _bound("less than the least allowed,", "ge"),
    "less_than_equal": _bound("more than the most allowed,", "le"),
    "greater_than": _bound("not more than", "gt"),
    "less_than": _bound("not less than", "lt"),
    "string_pattern_mismatch": _shape,
    "string_too_short": _length("at least", "min_length"),
    "string_too_long": _length("at most", "max_length"),
    "too_short": _entries("at least", "min_length"),
    "too_long": _entries("at most", "max_length"),
    "literal_error": _choice,
    "enum": _choice,
}
