"""kopf keeps the watches: `on.event` handlers for jobs, their pods and trainers, nodes and NodeClaims feed the cache.

What kopf does here: it logs in, lists in pages, watches with label selectors, opens streams again after errors, expiry
and silence, passes each object's events on in order, and ends the operator at a signal, or when a list or watch
fails for good. `on.event` handlers write nothing into anybody's object: no finalizer, annotation or Event.

Five gaps of kopf are closed in this file, and nowhere else:

- It copies every object four times to compare it with a state stored in annotations, which only the other decorators
  need; that was two fifths of the operator's time. `_NoDiffs` has nothing to compare.
- It fails on a stream that a load balancer ends, in order, in the middle of a line. `_WholeLines` drops the rest of
  such a line: its event comes again with the next watch.
- It parses what tenants wrote with a parser that recurses: jobs are screened before it sees them (`tenant_objects`).
- It ends at what is no list or no change, and at a watch's error: both are checked before (`answers`).
- Handlers learn neither whether a stream is alive nor when a list was taken anew. `StreamMonitor` sees both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import aiohttp
import kopf
import structlog

from polyrl.errors import UNDECODABLE
from polyrl_operator.api.answers import LIST_ANEW, MAX_LINE, checked_line, checked_list
from polyrl_operator.api.connect import OversizedAnswer
from polyrl_operator.api.kinds import CLAIM, JOB, NODE, POD, TRAINER, ResourceKind, permission_for
from polyrl_operator.api.tenant_objects import JOBS_PAGE, screened_line, screened_list
from polyrl_operator.informer.cache import Cache
from polyrl_operator.informer.resync import CHILDREN

log = structlog.get_logger(__name__)

READ: Final = frozenset(kind.plural for kind in (JOB, POD, TRAINER, NODE, CLAIM))
"""Collections whose lists kopf reads for us."""

PAGE: Final = 200
"""Objects per page of a first list: at 5,000 pods it keeps 150 MiB out of memory."""

INACTIVITY_S: Final = 70.0
"""A watch without events or bookmarks (one a minute) for so long is taken for dead, and opened again."""

LIST_S: Final = 30.0
"""Limit of one of kopf's lists."""

WATCH_CONNECT_S: Final = 5.0

BACKOFFS: Final = (0.5, 1, 2, *(5,) * 60)
"""Between tries of a list or of the start of a watch: five minutes in all, then kopf gives up and the operator ends, to
be restarted."""

AGAIN_S: Final = 1.0
"""Between two watches of a collection, and from an error of one to the next list."""

GONE: Final = 410
"""A page's token, or a watch's version, is older than what the server remembers; a slow list may take as long."""

IDLE_S: Final = 1.0
"""How long kopf keeps a task per object after its last event."""

IDENTITY: Final = "polyrl-operator"
"""What kopf calls itself in its own log. Else it asks for the user's name, and in a pod uid 10001 has none."""

EXIT_S: Final = 10.0
"""For an end in order, below the pod's grace."""


class StreamMonitor:
    """Middleware of kopf's session. A watch is alive while bytes come: events, or the bookmarks of every minute."""

    def __init__(self, on_gap: Callable[[], None]) -> None:
        """`on_gap` is called when a watch may have missed something: its collection was listed anew, or it stood open
        to its end and gave nothing, as behind a proxy that lost the server."""
        self._on_gap = on_gap
        self._listed: set[str] = set()
        self._alive_at: dict[str, float] = {}
        """By path: when its first watch was opened, then when one last gave bytes."""
        self._may_open_at: dict[str, float] = {}
        """By path: kopf itself opens a watch that ends at once hundreds of times a second."""
        self._pages: dict[str, int] = {}
        """Objects per page, by path, where PAGE of them were more than is read."""
        self._silent: set[str] = set()
        """Paths whose newest watch gave nothing yet."""

    def ages(self) -> dict[str, float]:
        """Seconds since each watch last gave a byte, by path."""
        now = time.monotonic()
        return {path: now - alive_at for path, alive_at in self._alive_at.items()}

    async def middleware(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        path, query = request.url.path, request.url.query
        verb = permission_for(request.method, path, watch="watch" in query).verb
        of_jobs = path.endswith(f"/{JOB.plural}")
        page = self._pages.get(path, JOBS_PAGE if of_jobs else PAGE)
        if verb == "list":
            request.url = request.url.update_query(limit=page)
        if verb == "watch":
            await self._pace(path)
        response = await handler(request)
        if response.status == GONE:
            return _list_anew(response, watching=verb == "watch", place=path)
        if path.rpartition("/")[2] in READ and verb == "list" and response.status == 200:
            asked = query.get("continue", "")
            halve = partial(self._pages.__setitem__, path, max(1, page // 2))
            checked = _CheckedList(response.content, path, asked, jobs=of_jobs, on_oversized=halve)
            response.content = cast(aiohttp.StreamReader, checked)
        if response.status == 200 and verb == "watch":
            response.content = cast(
                aiohttp.StreamReader, self._watched(path, response.content, screened_line if of_jobs else bytes)
            )
        elif response.status == 200 and verb == "list" and "continue" not in query:
            if path in self._listed:
                self._on_gap()
            self._listed.add(path)
        return response

    async def _pace(self, path: str) -> None:
        now = time.monotonic()
        begin = max(now, self._may_open_at.get(path, now))
        self._may_open_at[path] = begin + AGAIN_S
        await asyncio.sleep(begin - now)

    def _watched(self, path: str, content: aiohttp.StreamReader, screen: Callable[[bytes], bytes]) -> _WholeLines:
        if path in self._silent:
            self._on_gap()
        self._silent.add(path)
        # Only bytes count as life: a stream that is opened again and again, and stays silent, is dead.
        self._alive_at.setdefault(path, time.monotonic())

        def on_bytes() -> None:
            self._silent.discard(path)
            self._alive_at[path] = time.monotonic()

        return _WholeLines(content, path, on_bytes, screen, self._on_gap)


def _list_anew(response: aiohttp.ClientResponse, *, watching: bool, place: str) -> aiohttp.ClientResponse:
    """What kopf begins from a new list after; the status itself would end it. Raises ClientPayloadError for a page."""
    log.warning("what was read has expired; the list is asked for again", place=place)
    if not watching:
        response.close()
        raise aiohttp.ClientPayloadError("the list's next page has expired")
    response.status, response.content = 200, cast(aiohttp.StreamReader, _ExpiredWatch())
    return response


class _ExpiredWatch:
    """The content of a watch that begins too late."""

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """One line."""
        yield LIST_ANEW


class _WholeLines:
    """A response's content whose chunks end with lines; else as the content that it is made from."""

    def __init__(
        self,
        content: aiohttp.StreamReader,
        path: str,
        on_bytes: Callable[[], None],
        screen: Callable[[bytes], bytes],
        on_gap: Callable[[], None],
    ) -> None:
        self._content, self._path, self._on_bytes, self._screen = content, path, on_bytes, screen
        self._on_gap = on_gap
        self._strange = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Whole lines, of at most `size` new bytes each time."""
        rest = bytearray()
        async for data in self._content.iter_chunked(size):
            self._on_bytes()
            lines, newline, tail = data.rpartition(b"\n")
            if newline:
                whole = bytes(rest) + lines + newline
                yield b"".join(self._checked(line + newline) for line in whole.split(newline)[:-1])
                rest.clear()
            rest += tail
            if len(rest) > MAX_LINE:
                log.warning("a watch is opened anew: a line of it has no end", place=self._path, size=len(rest))
                raise aiohttp.ClientPayloadError("a line without an end")

    def _checked(self, line: bytes) -> bytes:
        """Empty: it is left out; the first of a stream is logged."""
        try:
            return checked_line(self._screen(line), self._path)
        except UNDECODABLE as error:
            if not self._strange:
                log.warning("a watch holds what is no change; it is left out", place=self._path, error=str(error))
            self._strange = True
            # It may have been a change, garbled on the way.
            self._on_gap()
            return b""


class _CheckedList:
    """A response's content with a page of a list, without what nobody could read, and of jobs without what is too large
    or too deep."""

    def __init__(
        self, content: aiohttp.StreamReader, path: str, asked: str, *, jobs: bool, on_oversized: Callable[[], None]
    ) -> None:
        self._content, self._path, self._asked, self._jobs = content, path, asked, jobs
        self._on_oversized = on_oversized

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def read(self) -> bytes:
        """Raises ClientPayloadError, after which kopf lists again a little later."""
        try:
            data = await self._content.read()
        except OversizedAnswer as error:
            log.warning("a list is asked for again, in smaller pages", place=self._path, error=str(error))
            self._on_oversized()
            raise
        try:
            # In a thread, or eight jobs of the largest kind would keep all others waiting.
            screened = await asyncio.to_thread(screened_list, data) if self._jobs else data
            return checked_list(screened, self._path, self._asked)
        except UNDECODABLE as error:
            log.warning("a list is asked for again: it cannot be read", place=self._path, error=str(error))
            raise aiohttp.ClientPayloadError("what came is no list") from None


class _NoDiffs(kopf.MultiDiffBaseStorage):
    """Stores nothing, and takes no copy of what it would compare."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()


async def run_watches(
    cache: Cache,
    connect: Callable[[], tuple[aiohttp.ClientSession, str]],
    namespaces: Sequence[str] | None,
    kinds: Sequence[ResourceKind],
    inactivity_s: float = INACTIVITY_S,
) -> None:
    """Watches until cancelled, or until a signal ends the operator. Raises when a list or watch fails for good."""
    registry = kopf.OperatorRegistry()

    # Asynchronous, or kopf would call it in a thread, where no session can be made.
    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        session, server = connect()
        return kopf.AiohttpSession(aiohttp_session=session, server=server)

    for kind in kinds:
        on_event = partial(_observe, cache, kind)
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)(on_event)
    await kopf.operator(
        registry=registry,
        settings=kopf_settings(inactivity_s),
        clusterwide=namespaces is None,
        namespaces=namespaces or (),
        standalone=True,
        identity=IDENTITY,  # type: ignore[arg-type]  # a NewType of text, which kopf does not export
    )


async def _observe(cache: Cache, kind: ResourceKind, /, event: kopf.RawEvent, **_: Any) -> None:
    cache.observe(kind, dict(event["object"]), deleted=event["type"] == "DELETED")


def watched_kinds(*, nodes: bool, claims: bool) -> tuple[ResourceKind, ...]:
    """Kinds to watch: nodes where the operator may, NodeClaims where Karpenter is."""
    return (JOB, POD, TRAINER, *((NODE,) if nodes else ()), *((CLAIM,) if nodes and claims else ()))


def kopf_settings(inactivity_s: float) -> kopf.OperatorSettings:
    """kopf as a reader of streams."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = _NoDiffs(())
    settings.persistence.progress_storage = kopf.MultiProgressStorage(())
    settings.watching.chunk_size = PAGE
    settings.watching.inactivity_timeout = inactivity_s
    settings.watching.connect_timeout = WATCH_CONNECT_S
    settings.watching.reconnect_backoff = AGAIN_S
    for kind in (POD, TRAINER):
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = CHILDREN
    settings.networking.request_timeout = LIST_S
    settings.networking.connect_timeout = WATCH_CONNECT_S
    settings.networking.error_backoffs = BACKOFFS
    settings.queueing.idle_timeout = IDLE_S
    settings.process.ultimate_exiting_timeout = EXIT_S
    return settings
