"""Two requests to a manager, each with a deadline: its status, and a drain.

Refuses to hold: retries, state (see `manager_link`). Read next: `polyrl.control`.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

import aiohttp
import msgspec

from polyrl.control import DRAIN_PATH, MAX_DRAIN_SECONDS, STATUS_PATH, DrainAnswer, DrainRequest
from polyrl.errors import UNDECODABLE, PolyRLError
from polyrl.status import ManagerStatus
from polyrl_operator.secret import ManagerCredentials

ANSWER_S: Final = 3.0
"""What a busy manager may take beyond the wait that was asked for."""

DRAIN_S: Final = 1.0
"""Of one try to tell a drain; the next follows at once."""

CONNECT_S: Final = 2.0
"""Within a cluster a handshake takes milliseconds; an address that is gone answers nothing at all."""

CONTEXTS: Final = 2048
"""TLS contexts kept, one per run; each costs 30 kB."""

REASON_LENGTH: Final = 1024
"""As `DrainRequest` bounds it."""

T = TypeVar("T")


class Unanswered(Exception):
    """No answer in time."""


@dataclass(frozen=True)
class Address:
    """Where a manager is, and how often it is asked."""

    host: str
    """IP address of its pod."""
    port: int
    pod_uid: str
    name: str
    """DNS name in its certificate."""
    poll_s: float

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"


class ManagerClient:
    """Of all managers."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def status(self, at: Address, access: ManagerCredentials, since: int, wait_s: float) -> ManagerStatus:
        """Its status once that is newer than `since`, or after `wait_s`. Raises Unanswered, PolyRLError."""
        path = f"{STATUS_PATH}?since={since}&waitSeconds={wait_s:g}"
        return _decode(await self._ask("GET", at, access, path, None, wait_s + ANSWER_S), ManagerStatus)

    async def drain(self, at: Address, access: ManagerCredentials, engine: str, deadline_s: float, reason: str) -> bool:
        """Tells it; False when it knows no such engine. Raises Unanswered, PolyRLError."""
        deadline_s = min(deadline_s, MAX_DRAIN_SECONDS)
        request = DrainRequest(engine=engine, deadline_seconds=deadline_s, reason=reason[:REASON_LENGTH] or "drain")
        answer = await self._ask("POST", at, access, DRAIN_PATH, msgspec.json.encode(request), DRAIN_S)
        return _decode(answer, DrainAnswer).known

    async def _ask(
        self, method: str, at: Address, access: ManagerCredentials, path: str, body: bytes | None, total_s: float
    ) -> bytes:
        try:
            async with self._session.request(
                method,
                at.url + path,
                data=body,
                headers={"Authorization": f"Bearer {access.token}", "Host": f"{at.name}:{at.port}"},
                ssl=_pinned(access.authority),
                server_hostname=at.name,
                timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S),
            ) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unanswered(str(error) or type(error).__name__) from error
        if response.status >= 400:
            raise PolyRLError(f"the manager answered {response.status} to {method} {path}: {text[:200]!r}")
        return text


def manager_session() -> aiohttp.ClientSession:
    """The session for all managers; its size is bounded by who asks."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=4), trust_env=False)


@lru_cache(maxsize=CONTEXTS)
def _pinned(authority: str) -> ssl.SSLContext:
    """Trusts this authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    return context


def _decode(answer: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except UNDECODABLE as error:
        raise PolyRLError(f"the manager's answer is no {kind.__name__}: {error}") from None
