"""What a list or a watch of the API server must be before anybody reads it; what is not is left out, with a line in the
log, and never ends the operator for all jobs.

Between the operator and the server stand load balancers, aggregated servers and proxies. kopf ends at an item without
metadata, at a watch's error other than 410, and at an answer of another kind; we would at a version that is no number.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import structlog

from polyrl.cluster.actions import Object
from polyrl.errors import UNDECODABLE

log = structlog.get_logger(__name__)

MAX_LINE: Final = 16 << 20
"""Bytes of one line of a watch: ten times what the API server stores of one object."""
SHOWN: Final = 200
"""Most characters of a server's words in the log."""
LIST_ANEW: Final = b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n'
"""Any error of a watch, for a reader that takes every other one for the end."""

Version = Annotated[str, msgspec.Meta(pattern="^[0-9]{0,20}$")]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Metadata(msgspec.Struct):
    name: Text
    uid: Text
    namespace: str = ""
    resourceVersion: Version = ""


class _Item(msgspec.Struct):
    metadata: _Metadata


class _ListMetadata(msgspec.Struct, rename={"more": "continue"}):
    resourceVersion: Version | None = ""
    more: str | None = ""


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: list[Any] | None = None


class _WatchLine(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)


class _Expired(msgspec.Struct):
    code: Literal[410]


class Page(NamedTuple):
    """One page of a list."""

    items: list[Object]
    version: str
    more: str
    """Token of the next page; empty: this is the last."""


def page_of(answer: Any, place: str, asked: str) -> Page:
    """The page that `asked` named; empty: the first. Raises UNDECODABLE for what is none."""
    page = msgspec.convert(answer, _List)
    if page.metadata.more and page.metadata.more == asked:
        raise msgspec.ValidationError("it names itself as the next page")
    items, fault, left_out = [], "", 0
    for item in page.items or ():
        try:
            msgspec.convert(item, _Item)
        except UNDECODABLE as error:
            fault, left_out = str(error), left_out + 1
        else:
            items.append(item)
    if left_out:
        log.warning("a list holds what is no object; it was left out", place=place, count=left_out, newest=fault)
    return Page(items, page.metadata.resourceVersion or "", more=page.metadata.more or "")


def checked_list(data: bytes, place: str, asked: str) -> bytes:
    """The page that `asked` named, for a parser that trusts it. Raises UNDECODABLE."""
    answer = msgspec.json.decode(data)
    return msgspec.json.encode(answer | {"items": page_of(answer, place, asked).items})


def checked_line(line: bytes, place: str) -> bytes:
    """A line of a watch for a parser that trusts it; of errors, 410 alone. Raises UNDECODABLE for what is no change."""
    if not line.strip():
        return line
    change = msgspec.json.decode(line, type=_WatchLine)
    if change.type == "ERROR":
        with suppress(*UNDECODABLE):
            msgspec.json.decode(change.object, type=_Expired)
            return line
        words = bytes(change.object)[:SHOWN].decode(errors="replace")
        log.warning("a watch ends with an error; the list is asked for again", place=place, error=words)
        return LIST_ANEW
    msgspec.json.decode(change.object, type=_Bookmark if change.type == "BOOKMARK" else _Item)
    return line
