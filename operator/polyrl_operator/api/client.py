"""The API server as seven verbs over plain dictionaries, on the transport and credentials of `kubernetes.aio`.

Every request has a deadline, and is sent again where the server asks for it or was not there: all that we send may be
repeated, because names are made before the request and deletes name a uid. No typed models: they cost memory and hide
fields that they do not know.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec
import structlog
from kubernetes.aio.client.api_client import ApiClient

from polyrl.cluster.actions import Object
from polyrl.errors import UNDECODABLE, PolyRLError
from polyrl_operator.api.answers import page_of
from polyrl_operator.api.connect import OversizedAnswer
from polyrl_operator.api.kinds import JOB, KINDS, ResourceKind
from polyrl_operator.api.tenant_objects import JOBS_PAGE, screened_job, screened_jobs, screened_line

log = structlog.get_logger(__name__)

FIELD_MANAGER: Final = "polyrl-operator"
REQUEST_S: Final = 12.0
"""Limit of one attempt. A healthy server answers in milliseconds; a webhook is given up after 10 s by default, and the
answer that says so comes after that."""
ATTEMPTS: Final = 4
"""Attempts of one request before its job backs off instead."""
RETRY_S: Final = 0.2
"""Before the second attempt; doubles, with jitter."""
MAX_RETRY_AFTER_S: Final = 5.0
"""Longest Retry-After that is waited for in place; a longer one lengthens the job's back-off."""
AGAIN: Final = frozenset({429, 500, 502, 503, 504})
"""Statuses that a later attempt may not meet."""
PAGE: Final = 200
"""Objects per page of a list: about 1 MB of pods, and ten times that while they are read."""
MAX_PAGES: Final = 20_000
"""Pages of one list: 160,000 jobs, or four million other objects."""

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

DATE_RESOLUTION_S: Final = 1.0
"""A Date header is cut to its second."""
LOGGED_CORRECTION_S: Final = 2.0
"""A correction of the clock worth a log line: more than the resolution and a slow answer explain."""

OF_WEBHOOK: Final = re.compile(r'(?:failed calling|admission) webhook "')
"""In the API server's words, whatever the status: one that it may not go without is away, or says no."""
OVERSIZED: Final = "Oversized"
"""Reason of our own: the answer has more bytes than are read."""
LISTED: Final = "LIST"
"""Type of the changes that begin with a list; all others are as the API server names them."""
WATCH_S: Final = 240
"""One watch; then the list is taken anew, which also repairs gaps."""
SILENCE_S: Final = WATCH_S + 30
"""Longest a stream may be silent: beyond a watch's end its connection is dead."""
FOLLOW_RETRY_S: Final = 1.0
"""Between a broken stream and the next one."""


class ApiError(PolyRLError):
    """The API server refused, or did not answer (status 0)."""

    retry_after_s = 0.0
    """What the server asks for; 0: nothing."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def transient(self) -> bool:
        """True when the same request may pass later without anybody changing anything."""
        return self.status == 0 or self.status in AGAIN

    @property
    def of_webhook(self) -> bool:
        """True when an admission webhook let it not be done: a refusal, until people mend the webhook."""
        return OF_WEBHOOK.search(str(self)) is not None


class NotLeader(PolyRLError):
    """Another replica may be acting: nothing is written."""


class ClusterClock:
    """The API server's time, learnt from its answers: timestamps on objects are compared with this, never with our own
    clock. `steady` is monotonic, `wall` what is believed before the first answer.

    Every answer carries its Date in whole seconds, so the server's time lies between two bounds; an estimate outside of
    them is corrected. Between answers the monotonic clock goes on: setting the machine's clock changes nothing.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self.steady = steady
        self._offset = wall() - steady()

    def now(self) -> float:
        """Unix seconds, as the API server counts them."""
        return self.steady() + self._offset

    def synchronize(self, date: str | None, sent_at: float) -> None:
        """An answer just came with this Date, to a request sent at `sent_at` of the steady clock."""
        if date is None:
            return
        try:
            server_time = parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        before = self._offset
        self._offset = min(max(before, server_time - self.steady()), server_time + DATE_RESOLUTION_S - sent_at)
        if abs(self._offset - before) > LOGGED_CORRECTION_S:
            log.warning("clock corrected to the API server's", by_s=round(self._offset - before, 1))


class Client:
    """Reads objects, and writes them as `field_manager`. `may_write` is asked before every attempt to change one;
    `clock` learns from every answer."""

    def __init__(
        self,
        api: ApiClient,
        may_write: Callable[[], bool] = lambda: True,
        field_manager: str = FIELD_MANAGER,
        clock: ClusterClock | None = None,
    ) -> None:
        self._api = api
        self.clock = clock or ClusterClock()
        self._may_write = may_write
        self._field_manager = field_manager

    async def get(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object; None when there is none."""
        return await self._find(kind.path(namespace, name))

    async def discover(self, kind: ResourceKind) -> frozenset[str]:
        """Plural names of what is served of this kind's group and version; empty when there is no such group."""
        answer = await self._find(f"/apis/{kind.api_version}") or {}
        return frozenset(one["name"] for one in answer.get("resources") or ())

    async def pages(
        self,
        kind: ResourceKind,
        namespace: str | None,
        label_selector: str = "",
        *,
        field_selector: str = "",
        metadata_only: bool = False,
    ) -> AsyncIterator[tuple[list[Object], str]]:
        """The collection page by page, each with the version of the whole. Raises ApiError 410 when it takes long."""
        query = {"limit": str(JOBS_PAGE if kind is JOB else PAGE)} | selectors(label_selector, field_selector)
        accept = METADATA_ONLY if metadata_only else JSON
        path = kind.path(namespace)
        for _ in range(MAX_PAGES):
            try:
                answer = await self._request("GET", path, query, accept=accept)
            except ApiError as error:
                if error.reason != OVERSIZED or query["limit"] == "1":
                    raise
                # Objects of a tenant, each as large as the API server lets it: fewer of them at a time.
                query["limit"] = str(int(query["limit"]) // 2)
                continue
            try:
                page = page_of(answer, path, query.get("continue", ""))
            except UNDECODABLE as fault:
                raise ApiError(200, "Undecodable", f"GET {path} is answered with what is no list: {fault}") from None
            yield page.items, page.version
            if not page.more:
                return
            query["continue"] = page.more
        raise ApiError(200, "Endless", f"GET {path} is answered with more than {MAX_PAGES:,} pages")

    async def create(self, item: Object, *, dry_run: bool = False) -> Object:
        """The object as stored. Raises ApiError; 409 when the name is taken."""
        query = {"fieldManager": self._field_manager} | ({"dryRun": "All"} if dry_run else {})
        return await self._request("POST", _collection(item), query, body=item)

    async def apply(self, item: Object) -> Object:
        """Server-side apply: the fields named in `item` are as it says from now on."""
        query = {"fieldManager": self._field_manager, "force": "true"}
        path = f"{_collection(item)}/{item['metadata']['name']}"
        return await self._request("PATCH", path, query, body=item, content=APPLY_PATCH)

    async def patch(
        self, kind: ResourceKind, namespace: str, name: str, change: Object, subresource: str = ""
    ) -> Object:
        """JSON merge patch. With metadata.uid or resourceVersion in `change` it is refused (409) for another object."""
        query = {"fieldManager": self._field_manager}
        path = kind.path(namespace, name, subresource)
        return await self._request("PATCH", path, query, body=change, content=MERGE_PATCH)

    async def update(self, item: Object) -> Object:
        """Replaces an object; refused (409) when its resourceVersion is not the newest."""
        return await self._request("PUT", f"{_collection(item)}/{item['metadata']['name']}", body=item)

    async def delete(
        self, kind: ResourceKind, namespace: str, name: str, uid: str, grace_s: int | None = None
    ) -> Object | None:
        """Deletes it if it is still the one with `uid`; None when it was gone already."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        options["propagationPolicy"] = "Background"
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            return await self._request("DELETE", kind.path(namespace, name), body=options)
        except ApiError as error:
            if error.status in (404, 409) and not error.of_webhook:
                return None
            raise

    def url(self, path: str, query: dict[str, str] | None = None) -> str:
        """Where the API server serves this path."""
        return f"{self._api.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")

    async def _find(self, path: str) -> Object | None:
        try:
            return await self._request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        *,
        body: Object | None = None,
        content: str = JSON,
        accept: str = JSON,
    ) -> Object:
        url = self.url(path, query)
        for attempt in range(1, ATTEMPTS + 1):
            if method != "GET" and not self._may_write():
                raise NotLeader(f"{method} {path} is not sent: this replica does not hold the lease")
            try:
                return await self._attempt(method, url, body, {"Content-Type": content, "Accept": accept})
            except ApiError as error:
                if not error.transient or attempt == ATTEMPTS or error.retry_after_s > MAX_RETRY_AFTER_S:
                    raise
                await asyncio.sleep(error.retry_after_s or RETRY_S * 2**attempt * random.uniform(0.5, 1))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, method: str, url: str, body: Object | None, headers: dict[str, str]) -> Object:
        headers["User-Agent"] = self._field_manager
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], url, method, body)
        sent_at = self.clock.steady()
        try:
            response = await self._api.rest_client.request(  # type: ignore[no-untyped-call]
                method, url, headers=headers, body=body, _request_timeout=REQUEST_S
            )
            data: bytes = await response.read()
        except OversizedAnswer as cause:
            raise ApiError(413, OVERSIZED, f"{method} {url}: {cause}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as cause:
            words = str(cause) or type(cause).__name__
            raise ApiError(0, "Unreachable", f"the API server does not answer: {words}") from cause
        if response.status < 400:
            self.clock.synchronize(response.headers.get("Date"), sent_at)
            try:
                # In a thread where it may be a page of the largest jobs, which would keep all others waiting.
                read = _reader(method, url)
                return await asyncio.to_thread(read, data) if read is screened_jobs else read(data)
            except UNDECODABLE as fault:
                raise ApiError(
                    response.status, "Undecodable", f"{method} {url} is answered with what cannot be read: {fault}"
                ) from None
        error = refusal(response.status, data, f"{method} {url} is answered with ")
        error.retry_after_s = _seconds(response.headers.get("Retry-After"))
        raise error


def _reader(method: str, url: str) -> Callable[[bytes], Object]:
    """Jobs are what tenants wrote, and are read as such; of all else the API server checked the fields."""
    parts = url.partition("?")[0].split("/")
    if JOB.plural not in parts:
        return msgspec.json.decode
    return screened_jobs if method == "GET" and parts[-1] == JOB.plural else screened_job


def selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    """The part of a query that selects objects."""
    given = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {name: text for name, text in given.items() if text}


def _collection(item: Object) -> str:
    return KINDS[item["kind"]].path(item["metadata"].get("namespace"))


def refusal(status: int, data: bytes, asked: str = "") -> ApiError:
    """The error that an answer with this status and body is; without words of the server it begins with `asked`."""
    try:
        words: Any = msgspec.json.decode(data)
        return ApiError(status, str(words.get("reason", "")), str(words.get("message", "")) or f"status {status}")
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
        return ApiError(status, "", f"{asked}status {status}: {data[:200]!r}")


def _seconds(text: str | None) -> float:
    """Seconds of a Retry-After header; its other form, a date, is not used by API servers."""
    return float(text) if text is not None and text.isdecimal() else 0.0


async def follow(
    client: Client,
    session: aiohttp.ClientSession,
    kind: ResourceKind,
    namespace: str | None,
    label_selector: str = "",
    field_selector: str = "",
) -> AsyncIterator[tuple[str, list[Object]]]:
    """What there is, as LISTED, then every change by its type, one object each; again from a list when a watch ends.

    For commands and tests that look at few objects for a while (the operator has kopf), until they stop. Raises
    ApiError when the cluster refuses; one that is away is awaited.
    """
    while True:
        try:
            found: list[Object] = []
            version = ""
            async for items, listed in client.pages(kind, namespace, label_selector, field_selector=field_selector):
                found, version = found + items, version or listed
            yield LISTED, found
            watch = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
            query = selectors(label_selector, field_selector) | watch | {"timeoutSeconds": str(WATCH_S)}
            url = client.url(kind.path(namespace), query)
            async for change in _changes(session, url, screened_line if kind is JOB else bytes):
                yield change
        except (aiohttp.ClientError, TimeoutError, OSError, ApiError) as error:
            if isinstance(error, ApiError) and not error.transient and error.status != 410:
                raise
            await asyncio.sleep(FOLLOW_RETRY_S)


async def _changes(
    session: aiohttp.ClientSession, url: str, screen: Callable[[bytes], bytes]
) -> AsyncIterator[tuple[str, list[Object]]]:
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)) as answer:
        if answer.status >= 400:
            raise refusal(answer.status, await answer.read())
        async for line in answer.content:
            # A load balancer may end a stream, in order, in the middle of a line: the list brings what was lost.
            if not line.endswith(b"\n"):
                return
            change: dict[str, Any] = (
                msgspec.json.decode(screen(line) or b'{"type": "BOOKMARK"}') if line.strip() else {"type": "BOOKMARK"}
            )
            if change["type"] == "ERROR":
                return
            if change["type"] != "BOOKMARK":
                yield change["type"], [change["object"]]
