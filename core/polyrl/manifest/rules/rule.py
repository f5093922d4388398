"""What a rule between fields is: one predicate written twice, in Python and in CEL, and one sentence for both.

Placeholders in a sentence are paths of fields below spec; Python prints their values, and so does the CEL expression
that is made from the same sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from pydantic.alias_generators import to_snake

from polyrl.manifest.spec import JobSpec

_PLACEHOLDER: Final = re.compile(r"\{([a-zA-Z.]+)\}")
_FIELD: Final = re.compile(r"\bself((?:\.[a-zA-Z]+(?![a-zA-Z_(]))+)")
"""A path from self, without the method that is called on it."""

IS_ONLINE: Final = "self.recipe.mode in ['rl', 'sft+rl']"
"""CEL for `Mode.is_online`."""


@dataclass(frozen=True)
class _Checked:
    """What rules and transitions share."""

    id: str
    """Name in tests and in errors."""
    path: str
    """The field to blame, below spec."""
    message: str
    """What is wrong; reads on from the field's name."""

    @property
    def field(self) -> tuple[str, ...]:
        """The field to blame, as keys below spec."""
        return tuple(self.path.split("."))

    def static_message(self, quote: str = "") -> str:
        """The message with the names of the fields, between quotes, where their values would stand."""
        return _PLACEHOLDER.sub(lambda found: f"{quote}{found[1].rpartition('.')[2]}{quote}", self.message)


@dataclass(frozen=True)
class Rule(_Checked):
    """One thing that must hold between fields of a spec, in Python and in CEL."""

    holds: Callable[[JobSpec], bool]
    cel: str
    """Over `self`, the spec with its defaults filled in."""

    def sentence(self, spec: JobSpec) -> str:
        """The message with the values of this spec."""
        return _PLACEHOLDER.sub(lambda found: _printed(spec, found[1]), self.message)

    def message_expression(self) -> str:
        """The message as a CEL expression over `self`; only for a message with placeholders. One `format`, because the
        API server cannot bound the length of a number's text and refuses to join what it cannot bound."""
        template = _PLACEHOLDER.sub("%s", self.message.replace("%", "%%"))
        values = ", ".join(f"dyn(self.{path})" for path in _PLACEHOLDER.findall(self.message))
        return f"'{template}'.format([{values}])"

    def fields_read(self) -> set[tuple[str, ...]]:
        """Fields that the predicate reads, as keys below spec."""
        return {tuple(path[1:].split(".")) for path in _FIELD.findall(self.cel)}


@dataclass(frozen=True)
class TransitionRule(_Checked):
    """One change that a stored object may not undergo."""

    cel: str
    """Over `self` and `oldSelf`, the new and the stored spec with their defaults filled in."""


def _printed(spec: JobSpec, path: str) -> str:
    value: Any = spec
    for key in path.split("."):
        value = getattr(value, to_snake(key))
    return str(value.value if isinstance(value, Enum) else value)
