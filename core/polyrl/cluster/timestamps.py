"""Times as the API server writes them, RFC 3339 in UTC, and as we reckon with them, Unix seconds."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def unix(stamp: object) -> float | None:
    """Unix seconds of an RFC 3339 time; None for anything else, as an absent field is."""
    if not isinstance(stamp, str):
        return None
    try:
        at = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return at.timestamp() if at.tzinfo is not None else None


def second(at: float) -> str:
    """RFC 3339 to the second, as conditions carry it."""
    return _moment(math.floor(at)).strftime("%Y-%m-%dT%H:%M:%SZ")


def millisecond(at: float) -> str:
    """RFC 3339 to the millisecond, for times that are subtracted from each other."""
    return _moment(round(at, 3)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
