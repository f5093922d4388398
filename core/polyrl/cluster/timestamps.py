"""Times as the API server writes them, RFC 3339 in UTC, and as we reckon with them, Unix seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

LAST: Final = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


def earliest(dues: Iterable[float | None], *, after: float) -> float | None:
    """The first of these moments that is yet to come; None when there is none."""
    return min((due for due in dues if due is not None and due > after), default=None)


def unix(timestamp: object) -> float | None:
    """Unix seconds of an RFC 3339 time from 1970 on; None for anything else, as an absent field is."""
    if not isinstance(timestamp, str):
        return None
    try:
        at = datetime.fromisoformat(timestamp)
    except ValueError:
        return None
    seconds = at.timestamp() if at.tzinfo is not None else -1.0
    # What is written again must be within the years of a datetime, whatever its zone.
    return seconds if 0 <= seconds <= LAST else None


def second(at: float) -> str:
    """RFC 3339 to the second, as conditions carry it."""
    return _moment(math.floor(at)).strftime("%Y-%m-%dT%H:%M:%SZ")


def millisecond(at: float) -> str:
    """RFC 3339 to the millisecond, for times that are subtracted from each other."""
    return _moment(round(at, 3)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
