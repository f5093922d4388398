"""PolyRLJobs as bytes that any tenant may have made: each is read alone, bounded in bytes and depth.

The CRD leaves parts of a job open (a model's config), and the API server takes 1.5 MB and 10,000 levels there, which no
recursive parser survives: one such job would end the operator for everybody, and again at every restart. So what is
nested too deeply is cut off before anything parses it, and a job at fault becomes one without a spec: `unreadable` says
why, which ends in that job's condition.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import structlog

from polyrl.cluster.actions import Object
from polyrl.cluster.observation.job import UNREADABLE
from polyrl.errors import UNDECODABLE
from polyrl_operator.api.kinds import JOB

log = structlog.get_logger(__name__)

MAX_JOB_BYTES: Final = 256 << 10
"""Of one job as the API server sends it. The longest of our examples has 4 kB; 1,000 such jobs at this limit would be
256 MB in the cache, which a quota on `count/polyrljobs.polyrl.dev` bounds."""
MAX_DEPTH: Final = 64
"""Levels of one job; a pod's template in it needs 14."""
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
_NEXT_BRACKET: Final = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{}])', re.DOTALL)
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET: Final = bytes(sorted(set(range(256)) - set(b"[]{}")))


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
    return _read(_flattened(data, MAX_DEPTH), len(data))


def screened_jobs(data: bytes) -> Object:
    """A page of jobs; one that cannot be named is left out, with a line in the log. Raises UNDECODABLE."""
    page = msgspec.json.decode(_flattened(data, MAX_DEPTH + 2), type=_Page)
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
        change = msgspec.json.decode(_flattened(line, MAX_DEPTH + 1), type=_Change)
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
    elif _REMOVED in shallow:
        fault = f"the object is nested too deeply; at most {MAX_DEPTH} levels are read"
    else:
        whole: Object = msgspec.json.decode(shallow)
        return whole
    parts = msgspec.json.decode(shallow, type=_Parts)
    metadata = {key: parts.metadata[key] for key in IDENTITY_FIELDS if key in parts.metadata}
    kept: Object = {"apiVersion": JOB.api_version, "kind": JOB.name, "metadata": metadata, UNREADABLE: fault}
    if len(parts.status) <= MAX_JOB_BYTES and _REMOVED not in bytes(parts.status):
        kept["status"] = msgspec.json.decode(parts.status)
    return kept


def _flattened(data: bytes, depth: int) -> bytes:
    """JSON with everything below `depth` levels cut off: by its brackets, one after another, so that no nesting counts.
    A millisecond for 4,000 brackets, which only a hostile author costs us."""
    if not _is_deeper(data, depth):
        return data
    kept, level, begin = bytearray(), 0, 0
    for found in _NEXT_BRACKET.finditer(data):
        if found[1] in b"[{":
            level += 1
            if level == depth + 1:
                kept += data[begin : found.start(1)] + _REMOVED
        else:
            if level == depth + 1:
                begin = found.end()
            level -= 1
    return bytes(kept) + data[begin:]


def _is_deeper(data: bytes, depth: int) -> bool:
    """Whether JSON has more levels: brackets alone, from which pairs of neighbours are taken once for each level."""
    left = _STRING.sub(b"", data).translate(_ONE_KIND, _NO_BRACKET)
    for _ in range(depth):
        if not left:
            return False
        left = left.replace(b"[]", b"")
    return bool(left)
