"""The manager's HTTP API as values: paths, JSON bodies, the endpoints file. Clients and server import the same names.

    GET  /v1/status?since=SEQ&waitSeconds=S   status.ManagerStatus; waits until `seq` > SEQ, at most S seconds
    GET  /v1/waits                            Waits: who waits for whom, since when and until when
    POST /v1/drain        DrainRequest        DrainAnswer; saying it again changes nothing
    GET  /v1/history?after=TIME               History: rows and events later than TIME, in Unix seconds
    GET  /v1/page                             the same as an HTML page for people, with samples to read
    GET  /metrics                             Prometheus text
    GET  /healthz                             Health; the only path that needs no token

Every other request carries `Authorization: Bearer TOKEN`. A refused one answers 4xx with a Problem, one sentence.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from polyrl.errors import UNDECODABLE
from polyrl.history.fleet import FleetEvent
from polyrl.history.rows import MetricsRow
from polyrl.sample import Pool
from polyrl.status import ManagerStatus

STATUS_PATH: Final = "/v1/status"
WAITS_PATH: Final = "/v1/waits"
HISTORY_PATH: Final = "/v1/history"
PAGE_PATH: Final = "/v1/page"
DRAIN_PATH: Final = "/v1/drain"
METRICS_PATH: Final = "/metrics"
HEALTH_PATH: Final = "/healthz"

MAX_WAIT_SECONDS: Final = 60.0
"""Longest `waitSeconds` that is honoured; below the idle timeouts of common proxies."""

MAX_DRAIN_SECONDS: Final = 3600.0
"""Longest deadline of a drain; a notice that is longer than an hour is no notice."""

_IPV4_ENDPOINT: Final = re.compile(r"tcp://\d+\.\d+\.\d+\.\d+:(\d+|\*)")


class _Body(msgspec.Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """Base of the API's own bodies."""


class Endpoints(_Body, frozen=True):
    """`RUN/run/endpoints/manager.json`: where a manager listens; replaced as a whole when it starts again."""

    agents: str
    """ZeroMQ endpoint of agents, `tcp://host:port`."""
    trainer: str
    """ZeroMQ endpoint of the trainer."""
    http: str
    """Base URL of the HTTP API, `https://host:port`."""
    pid: int
    """0 in pods, where it says nothing."""
    run_epoch: int = msgspec.field(name="epoch")
    public_key: str
    """CURVE server key of both ZeroMQ sockets, Z85; empty in pods. Peers believe their key file, not this."""


class DrainRequest(_Body, frozen=True, omit_defaults=True):
    """`engine` will end within `deadlineSeconds`: move or finish what it runs, give it nothing new."""

    engine: Annotated[str, Meta(min_length=1, max_length=255)]
    deadline_seconds: Annotated[float, Meta(ge=0, le=MAX_DRAIN_SECONDS)]
    reason: Annotated[str, Meta(min_length=1, max_length=1024)]
    ended: bool = False
    """Its pod is gone, and no other gets the name: who proves it from now on is refused, also after a restart."""


class DrainAnswer(_Body, frozen=True):
    """The engine drains now, did so already, or is not known (`known` false: there is nothing to drain)."""

    engine: str
    known: bool


class Waits(_Body, frozen=True):
    """Every wait that the manager knows of, the longest first."""

    waits: tuple[str, ...]
    """Each a sentence: who waits for whom, for what, since when, until when."""


class History(_Body, frozen=True):
    """What the manager remembers of the run since it began: steps, evaluations, what happened to engines."""

    began: float
    """Unix seconds since when it remembers."""
    resumed: bool
    """The run is older: the manager was started again, and what was before lies with the trainer."""
    rows: tuple[MetricsRow, ...]
    """Rows of metrics. Of the older rows of a long run only every second one is kept, again and again."""
    events: tuple[FleetEvent, ...]
    seconds: dict[Pool, float]
    """Seconds that machines were held since then, by what they are paid as."""
    machines: dict[Pool, int]
    """Held now."""


class Health(_Body, frozen=True):
    """The manager's loop is alive: it wrote this."""

    run_epoch: int = msgspec.field(name="epoch")
    uptime_seconds: float


class Problem(_Body, frozen=True):
    """Why a request was refused."""

    error: str


BODIES: Final[dict[str, tuple[str, type[Any] | None, type[Any]]]] = {
    STATUS_PATH: ("get", None, ManagerStatus),
    WAITS_PATH: ("get", None, Waits),
    HISTORY_PATH: ("get", None, History),
    DRAIN_PATH: ("post", DrainRequest, DrainAnswer),
    HEALTH_PATH: ("get", None, Health),
}
"""Path to method, request body, answer: the JSON part of the API, from which its OpenAPI document is made."""


def bracketed(host: str) -> str:
    """A host as it stands before a port: an IPv6 address goes into brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def may_be_ipv6(endpoint: str) -> bool:
    """False for `tcp://`, an IPv4 address and a port: only then may the socket that binds or dials do without IPv6."""
    return _IPV4_ENDPOINT.fullmatch(endpoint) is None


def parse_endpoints(text: str | bytes, source: str) -> Endpoints:
    """The endpoints in a file's text. Raises ValueError naming `source` when it is not such a file."""
    try:
        return msgspec.json.decode(text, type=Endpoints)
    except UNDECODABLE as error:
        raise ValueError(f"{source}: not an endpoints file of a manager: {error}") from None
