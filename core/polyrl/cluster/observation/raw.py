"""Reading fields of raw Kubernetes objects, which may lack any of them and must not make an operator fall.

Each reads what lies below `path`; what is not there is empty, 0 or False. So is a field of the wrong type: the API
server checked its own types, and what it did not check (a CRD's open fields, a test's hand-written object) must end as
"not known", never as an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

Raw: TypeAlias = Mapping[str, Any]
NOTHING: Final[Raw] = {}


def part(obj: object, *path: str) -> Raw:
    found = _at(obj, path)
    return found if isinstance(found, Mapping) else NOTHING


def parts(obj: object, *path: str) -> list[Raw]:
    found = _at(obj, path)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list | tuple) else []


def text(obj: object, *path: str) -> str:
    found = _at(obj, path)
    return found if isinstance(found, str) else ""


def count(obj: object, *path: str) -> int:
    found = _at(obj, path)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def flag(obj: object, *path: str) -> bool:
    return _at(obj, path) is True


def condition(obj: object, kind: str) -> Raw:
    """The condition of this type in `status.conditions`; empty when there is none."""
    return next((one for one in parts(obj, "status", "conditions") if one.get("type") == kind), NOTHING)


def holds(found: Raw) -> bool:
    """True when a condition's status is "True"."""
    return found.get("status") == "True"


def _at(obj: object, path: tuple[str, ...]) -> object:
    for key in path:
        if not isinstance(obj, Mapping):
            return None
        obj = obj.get(key)
    return obj
