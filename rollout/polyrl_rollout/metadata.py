"""What AWS, Google Cloud and Azure tell a machine about its own end.

One class per cloud says what is asked and what the answers mean, pure but for `ask`; `MetadataWatcher` polls over HTTP.

AWS     two minutes ahead, as a rule
        PUT api/token                                     token, for TOKEN_S
        GET spot/instance-action                          404, or {"action": "terminate", "time": "2026-01-01T..Z"}
        GET events/recommendations/rebalance              404, or {"noticeTime": ...}: only a warning
        Pods reach it only where the machine's hop limit is 2 or more; elsewhere nothing answers.
GCP     one value turns from FALSE to TRUE; how long is left it does not say
        GET instance/preempted?wait_for_change=true       held back until the value is not that of last_etag
Azure   30 s ahead on a spot machine; the events are those of the whole scale set
        GET instance/compute/name                         this machine, asked once
        GET scheduledevents                               {"Events": [{"EventType": "Preempt", "Resources": [..]}]}
        The first request switches the service on, which may take two minutes.

Pods often cannot reach it: no answer, or nonsense, is logged once and tried again after AWAY_S; other signs must do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Final, Protocol, TypeAlias
from urllib.parse import quote

import aiohttp
import msgspec
import structlog

from polyrl.errors import UNDECODABLE, ProtocolError
from polyrl.manifest.rollout import CapacitySpec
from polyrl.sample import Pool

METADATA_URL: Final = "http://169.254.169.254"
"""Link-local, so it never leaves the machine; the same on AWS, GCP and Azure."""
METADATA_ANSWER_S: Final = 3.0
"""Metadata is on the machine itself, and answers in milliseconds."""
AWAY_S: Final = 30.0
"""Between polls while nobody answers: such a service is rarely away, and a way to it rarely comes up later."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class MetadataRequest:
    """One HTTP request."""

    path: str
    """Path with its query."""
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    wait_s: float = 0.0
    """How long the cloud may hold it back until something changes."""


@dataclass(frozen=True)
class MetadataResponse:
    """Its answer, whatever the status."""

    status: int
    body: bytes = b""
    etag: str = ""
    """Names this state of the value, so that a change between two requests is not missed."""


@dataclass(frozen=True)
class TerminationNotice:
    """The machine will be taken away."""

    seconds: float
    """Until then."""
    reason: str
    """In the cloud's words, for people."""


@dataclass(frozen=True)
class PollResult:
    """What one poll has brought."""

    notice: TerminationNotice | None = None
    advice: str = ""
    """A warning that is no notice: the machine may stay."""


Ask: TypeAlias = Callable[[MetadataRequest], Awaitable[MetadataResponse]]
"""Sends a request to the metadata service."""


class CloudMetadata(Protocol):
    """One cloud's metadata service. Holds what outlasts a poll: a token, a name."""

    poll_interval_s: float

    async def poll(self, ask: Ask, now: float) -> PollResult:
        """Asks at `now`, Unix seconds. Raises ProtocolError for a response that this cloud does not give."""


# --- AWS: instance metadata, version 2 --------------------------------------------------------------------------------

TOKEN_PATH: Final = "/latest/api/token"
ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_S: Final = 21_600
"""The longest that AWS gives."""
UNAUTHORIZED: Final = 401
NOT_THERE: Final = 404


class _Action(msgspec.Struct):
    action: str
    time: datetime


class Aws:
    """One instance."""

    poll_interval_s: float = 5.0
    """As AWS advises."""

    def __init__(self) -> None:
        self._token = ""

    async def poll(self, ask: Ask, now: float) -> PollResult:
        action = await self._get(ask, ACTION_PATH)
        if action.status != NOT_THERE:
            return PollResult(notice=action_notice(action.body, now))
        advice = await self._get(ask, REBALANCE_PATH)
        return PollResult() if advice.status == NOT_THERE else PollResult(advice="AWS recommends to rebalance")

    async def _get(self, ask: Ask, path: str) -> MetadataResponse:
        """Asks with a token, and once more with a fresh one when the old one is refused."""
        for fresh in (not self._token, True):
            if fresh:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                response = await ask(MetadataRequest(TOKEN_PATH, headers, method="PUT"))
                self._token = _expect(response, TOKEN_PATH, 200).body.decode("ascii", "replace")
            response = await ask(MetadataRequest(path, {"X-aws-ec2-metadata-token": self._token}))
            if response.status != UNAUTHORIZED:
                break
        return _expect(response, path, 200, NOT_THERE)


def action_notice(body: bytes, now: float) -> TerminationNotice:
    """What spot/instance-action says, at `now` (Unix seconds). Raises ProtocolError."""
    try:
        action = msgspec.json.decode(body, type=_Action)
    except UNDECODABLE as error:
        raise ProtocolError(f"{ACTION_PATH}: {error}") from None
    if action.time.tzinfo is None:
        raise ProtocolError(f"{ACTION_PATH}: its time names no zone")
    return TerminationNotice(max(0.0, action.time.timestamp() - now), f"AWS will {action.action} the instance")


# --- Google Cloud -----------------------------------------------------------------------------------------------------

WAIT_S: Final = 60
"""Longest that one request is held back; shorter than the idle time of anything between."""
PREEMPTED_PATH: Final = "/computeMetadata/v1/instance/preempted"
NOTICE_S: Final = 15.0
"""Half of GKE's default graceful shutdown of 30 s, the other half is for pods of the system. Pools may be given more;
asking for less costs only tokens that others generate."""


class Gcp:
    """One machine."""

    poll_interval_s: float = 0.0
    """The cloud holds each request back itself."""

    def __init__(self) -> None:
        self._etag = "0"
        """The tag of the value that we know; this one, which none has, is answered at once."""

    async def poll(self, ask: Ask, now: float) -> PollResult:
        wait = f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={quote(self._etag)}"
        headers = {"Metadata-Flavor": "Google"}
        response = await ask(MetadataRequest(PREEMPTED_PATH + wait, headers, wait_s=float(WAIT_S)))
        notice = preemption_notice(_expect(response, PREEMPTED_PATH, 200).body)
        self._etag = response.etag
        return PollResult(notice=notice)


def preemption_notice(body: bytes) -> TerminationNotice | None:
    """What instance/preempted says. Raises ProtocolError."""
    match body.strip():
        case b"TRUE":
            return TerminationNotice(NOTICE_S, "Google Cloud preempts the instance")
        case b"FALSE":
            return None
    raise ProtocolError(f"{PREEMPTED_PATH}: neither TRUE nor FALSE: {body[:40]!r}")


# --- Azure: scheduled events ------------------------------------------------------------------------------------------

NAME_PATH: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS_PATH: Final = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_HEADERS: Final = {"Metadata": "true"}
ENDING_EVENTS: Final = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events after which nothing that runs now is there; Freeze lasts seconds."""


class _ScheduledEvent(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    not_before: str = ""
    """RFC 1123; empty once it has begun."""


class _Events(msgspec.Struct, rename="pascal"):
    events: list[_ScheduledEvent] = []


class Azure:
    """One virtual machine."""

    poll_interval_s: float = 2.0
    """Azure advises a second; of its half minute, two are little."""

    def __init__(self) -> None:
        self._name = ""

    async def poll(self, ask: Ask, now: float) -> PollResult:
        if not self._name:
            response = await ask(MetadataRequest(NAME_PATH, AZURE_HEADERS))
            self._name = _expect(response, NAME_PATH, 200).body.decode("utf-8", "replace").strip()
        response = await ask(MetadataRequest(EVENTS_PATH, AZURE_HEADERS))
        return PollResult(notice=event_notice(_expect(response, EVENTS_PATH, 200).body, self._name, now))


def event_notice(body: bytes, machine: str, now: float) -> TerminationNotice | None:
    """The first end that awaits `machine`, at `now` (Unix seconds). Raises ProtocolError."""
    try:
        events = msgspec.json.decode(body, type=_Events).events
    except UNDECODABLE as error:
        raise ProtocolError(f"{EVENTS_PATH}: {error}") from None
    ends = [event for event in events if event.event_type in ENDING_EVENTS and machine in event.resources]
    notices = [TerminationNotice(_seconds(event, now), f"Azure: {event.event_type} is scheduled") for event in ends]
    return min(notices, key=lambda notice: notice.seconds, default=None)


def _seconds(event: _ScheduledEvent, now: float) -> float:
    if not event.not_before:
        return 0.0
    try:
        return max(0.0, parsedate_to_datetime(event.not_before).timestamp() - now)
    except ValueError as error:
        raise ProtocolError(f"{EVENTS_PATH}: {error}") from None


def _expect(response: MetadataResponse, what: str, *statuses: int) -> MetadataResponse:
    """The response, if its status is one of these. Raises ProtocolError."""
    if response.status not in statuses:
        raise ProtocolError(f"{what}: answered with HTTP status {response.status}")
    return response


# --- polling ----------------------------------------------------------------------------------------------------------

CLOUDS: Final[dict[str, Callable[[], CloudMetadata]]] = {"Karpenter": Aws, "EKSManaged": Aws, "GKE": Gcp, "AKS": Azure}
"""By `rollout.capacity.preset`; None says nothing of a cloud."""


def asked_cloud(capacity: CapacitySpec, pool: Pool) -> CloudMetadata | None:
    """Whom a rollout asks: nobody unless its manifest says so, and on reserved machines nobody in any case."""
    cloud = CLOUDS.get(capacity.preset) if capacity.metadata_service and pool is not Pool.RESERVED else None
    return None if cloud is None else cloud()


class MetadataWatcher:
    """`run` once; `on_notice` is called at most once."""

    def __init__(
        self, cloud: CloudMetadata, url: str, on_notice: Callable[[TerminationNotice], None], away_s: float = AWAY_S
    ) -> None:
        self._cloud, self._url, self._on_notice, self._away_s = cloud, url, on_notice, away_s
        self._logged = ""

    async def run(self) -> None:
        """Until there is a notice."""
        async with aiohttp.ClientSession() as session:
            while (result := await self._poll(session)) is None or result.notice is None:
                if result is not None and result.advice:
                    self._log_once(result.advice)
                await asyncio.sleep(self._cloud.poll_interval_s if result is not None else self._away_s)
        self._on_notice(result.notice)

    async def _poll(self, session: aiohttp.ClientSession) -> PollResult | None:
        """None when there was no answer, or one that makes no sense."""

        async def ask(request: MetadataRequest) -> MetadataResponse:
            timeout = aiohttp.ClientTimeout(total=request.wait_s + METADATA_ANSWER_S)
            url = self._url + request.path
            async with session.request(request.method, url, headers=request.headers, timeout=timeout) as response:
                return MetadataResponse(response.status, await response.read(), etag=response.headers.get("ETag", ""))

        try:
            return await self._cloud.poll(ask, time.time())
        except (aiohttp.ClientError, TimeoutError) as error:
            self._log_once(f"no answer: {type(error).__name__}")
        except ProtocolError as error:
            self._log_once(str(error))
        return None

    def _log_once(self, message: str) -> None:
        """Until there is something else to log."""
        if message != self._logged:
            log.info("metadata", message=message)
            self._logged = message
