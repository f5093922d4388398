"""PolyRLJobs as bytes that any tenant may have made: each is read alone, bounded in bytes and depth.

The CRD leaves parts of a job open (a model's config), and the API server takes 1.5 MB and 10,000 levels there, which no
recursive parser survives: one such job would end the operator for everybody, and again at every restart. So what is
nested too deeply is cut off before anything parses it, and a job at fault becomes one without a spec: `unreadable` says
why, which ends in that job's condition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from polyrl.cluster.actions import Object
from polyrl.cluster.observation.job import UNREADABLE
from polyrl.errors import UNDECODABLE
from polyrl_operator.api.kinds import JOB

log = structlog.get_logger(__name__)

MAX_JOB_BYTES: Final = 256 << 10
"""Bytes of one job as the API server sends it. The longest of our examples has 4 kB; 1,000 such jobs at this limit
would be 256 MB in the cache, which a quota on `count/polyrljobs.polyrl.dev` bounds."""
MAX_DEPTH: Final = 64
"""Levels of one job; a pod's template in it needs 14."""
MAX_CONTAINERS: Final = 4096
"""Lists and maps of one job, a hundred times what our longest example has. Each costs whoever reads the job, again and
again; at this limit a decision takes 20 ms."""
JOBS_PAGE: Final = 8
"""Jobs per page of a list: 12 MB, were each as large as the API server stores."""
IDENTITY_FIELDS: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)

_REMOVED: Final = b'"polyrl.dev/cut-off"'
"""Stands for what was nested too deeply."""
_STEPS: Final = np.zeros(256, np.int8)
"""Change of the level of nesting, by byte."""
_STEPS[[ord("["), ord("{")]], _STEPS[[ord("]"), ord("}")]] = 1, -1
PART_BYTES: Final = 16 << 10
"""Searched at once for brackets: what is noted of them takes thirty times that for a moment."""


class _Page(msgspec.Struct):
    """A list of jobs, or one page of it."""

    metadata: dict[str, Any]
    items: list[msgspec.Raw] | None = None


class _Change(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class _Parts(msgspec.Struct):
    """What is kept of a job that is not read."""

    metadata: dict[str, Any]
    status: msgspec.Raw = msgspec.Raw(b"{}")


def screened_job(data: bytes) -> Object:
    """A job, or what else the API server answers where it was asked for one. Raises UNDECODABLE."""
    return _read(_flattened(data, 2, MAX_DEPTH), len(data))


def screened_jobs(data: bytes) -> Object:
    """A page of jobs; one that cannot be named is left out, with a line in the log. Raises UNDECODABLE."""
    page = msgspec.json.decode(_flattened(data, 4, MAX_DEPTH + 2), type=_Page)
    items = []
    for raw in page.items or ():
        try:
            items.append(_read(bytes(raw), len(raw)))
        except UNDECODABLE as error:
            log.warning("a job was left out: it cannot be read", error=str(error), size=len(raw))
    return {"apiVersion": JOB.api_version, "kind": f"{JOB.name}List", "metadata": page.metadata, "items": items}


def screened_list(data: bytes) -> bytes:
    """A page of jobs for a parser that trusts it."""
    return msgspec.json.encode(screened_jobs(data))


def screened_line(line: bytes) -> bytes:
    """A line of a watch of jobs for a parser that trusts it, with its end; empty: it is left out."""
    if not line.strip():
        return line
    try:
        change = msgspec.json.decode(_flattened(line, 3, MAX_DEPTH + 1), type=_Change)
        if change.type in ("BOOKMARK", "ERROR"):
            return line
        return (
            msgspec.json.encode({"type": change.type, "object": _read(bytes(change.object), len(change.object))})
            + b"\n"
        )
    except UNDECODABLE as error:
        log.warning("a change of a job was left out: it cannot be read", error=str(error), size=len(line))
        return b""


def _read(shallow: bytes, size: int) -> Object:
    """`shallow` holds nothing too deep."""
    if size > MAX_JOB_BYTES:
        fault = f"the object has {size:,} bytes as stored; at most {MAX_JOB_BYTES:,} are read"
    elif (count := _containers(shallow)) > MAX_CONTAINERS:
        fault = f"the object holds {count:,} lists and maps; at most {MAX_CONTAINERS:,} are read"
    elif _REMOVED in shallow:
        fault = f"the object is nested too deeply; at most {MAX_DEPTH} levels are read"
    else:
        return _with_status_or_none(msgspec.json.decode(shallow))
    parts = msgspec.json.decode(shallow, type=_Parts)
    metadata = {key: parts.metadata[key] for key in IDENTITY_FIELDS if key in parts.metadata}
    kept: Object = {"apiVersion": JOB.api_version, "kind": JOB.name, "metadata": metadata, UNREADABLE: fault}
    if len(parts.status) <= MAX_JOB_BYTES and _REMOVED not in bytes(parts.status):
        kept["status"] = msgspec.json.decode(parts.status)
    return _with_status_or_none(kept)


def _with_status_or_none(job: Object) -> Object:
    if not isinstance(job, dict):
        raise msgspec.ValidationError("it is no object")
    if not isinstance(job.get("status", {}), dict):
        del job["status"]  # no field of ours could be written into it
    return job


def _containers(data: bytes) -> int:
    """Lists and maps."""
    most = data.count(b"[") + data.count(b"{")
    return most if most <= MAX_CONTAINERS else sum(int(opens.sum()) for _, _, opens in _brackets(data))


def _flattened(data: bytes, level: int, deepest: int) -> bytes:
    """JSON in which each value that begins at `level` and reaches below `deepest` is replaced: by its brackets alone,
    so that no nesting counts. Some 20 ms for a megabyte of them, however they are nested."""
    cuts: list[tuple[int, int]] = []
    begin, is_open = -1, False
    """Where the newest value at `level` begins; and whether it is to be cut off, and has not ended yet."""
    for positions, levels, opens in _brackets(data):
        begins = np.concatenate([[begin], positions[opens & (levels == level)]])
        ends = positions[~opens & (levels == level - 1)] + 1
        if is_open and len(ends):
            cuts[-1], is_open = (cuts[-1][0], int(ends[0])), False
        begin = int(begins[-1])
        too_deep = positions[opens & (levels > deepest)]
        for one in begins[np.unique(np.searchsorted(begins, too_deep, side="right") - 1)].tolist():
            if not cuts or cuts[-1][0] != one:
                end = np.searchsorted(ends, one, side="right")
                is_open = bool(end == len(ends))
                cuts.append((one, len(data) if is_open else int(ends[end])))
    return _without(data, cuts) if cuts else data


def _without(data: bytes, cuts: list[tuple[int, int]]) -> bytes:
    kept, at = bytearray(), 0
    for begin, end in cuts:
        kept += data[at:begin] + _REMOVED
        at = end
    return bytes(kept) + data[at:]


_Column: TypeAlias = npt.NDArray[np.int64]


def _brackets(data: bytes) -> Iterator[tuple[_Column, _Column, npt.NDArray[np.bool_]]]:
    """All brackets outside of strings, in parts: where they stand, how deep it is after them, whether they open."""
    level, in_string, escapes = 0, False, False
    for start in range(0, len(data), PART_BYTES):
        part = np.frombuffer(data, np.uint8, count=min(PART_BYTES, len(data) - start), offset=start)
        quotes, escapes = _quotes(part, escapes)
        inside = np.logical_xor.accumulate(np.concatenate([[in_string], quotes]))
        found = np.flatnonzero(_STEPS[part] * ~inside[1:])
        in_string = bool(inside[-1])
        steps = _STEPS[part[found]]
        levels = level + np.cumsum(steps, dtype=np.int64)
        level = int(levels[-1]) if len(levels) else level
        yield found + start, levels, steps > 0


def _quotes(part: npt.NDArray[np.uint8], escapes: bool) -> tuple[npt.NDArray[np.bool_], bool]:
    """Which bytes begin or end a string, when the byte before `escapes` the first one; and whether the last does."""
    backslash = part == ord("\\")
    if not escapes and not backslash.any():
        return part == ord('"'), False
    at = np.arange(1, len(part) + 1)
    other = np.maximum.accumulate(np.where(backslash, -int(escapes), at))
    """The newest byte that is none; of backslashes in a row every second one is escaped itself."""
    odd = (at - other) % 2 == 1
    return (part == ord('"')) & ~np.concatenate([[escapes], odd[:-1]]), bool(odd[-1])
