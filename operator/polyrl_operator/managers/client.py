"""The one client of a manager's HTTP API, for the operator and for the command line: status, waits and drain.

Every request has a deadline; who asks again, and when, is the caller's business (`poller`, `polyrl_cli.local.manager`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from polyrl import control
from polyrl.errors import UNDECODABLE, ProtocolError
from polyrl.status import ManagerStatus
from polyrl_operator.secret import ManagerCredentials

MANAGER_ANSWER_S: Final = 3.0
"""What a busy manager may take beyond the wait that was asked for."""

DRAIN_S: Final = 1.0
"""Limit of one try to send a drain; the next follows at once."""

CONNECT_S: Final = 2.0
"""Within a cluster a handshake takes milliseconds; an address that is gone answers nothing at all."""

CONTEXTS: Final = 2048
"""TLS contexts kept, one per run; each costs 30 kB."""

REASON_LENGTH: Final = 1024
"""As `DrainRequest` bounds it."""

MAX_ANSWER: Final = 1 << 20
"""Bytes; a status of 512 engines has 300 kB. A manager's image may be its job's author's own, and answer without
end."""

MAX_SHOWN: Final = 200
"""Characters of an answer, or of what is wrong with it, that go into a log and a job's conditions."""

T = TypeVar("T")


class ManagerUnreachable(Exception):
    """No answer in time."""


@dataclass(frozen=True)
class Address:
    """Where a manager is, and how often it is asked."""

    host: str
    """IP address of its pod."""
    port: int
    pod_uid: str = ""
    name: str = ""
    """DNS name in its certificate; empty: it is on this machine and speaks plain HTTP."""
    poll_s: float = 5.0

    @property
    def url(self) -> str:
        return f"{'https' if self.name else 'http'}://{control.bracketed(self.host)}:{self.port}"


class ManagerClient:
    """Speaks with any number of managers over one session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def status(self, at: Address, credentials: ManagerCredentials, since: int, wait_s: float) -> ManagerStatus:
        """Its status once that is newer than `since`, or after `wait_s`. Raises ManagerUnreachable, ProtocolError."""
        path = f"{control.STATUS_PATH}?since={since}&waitSeconds={wait_s:g}"
        return await self._ask("GET", at, credentials, path, ManagerStatus, wait_s + MANAGER_ANSWER_S)

    async def waits(self, at: Address, credentials: ManagerCredentials) -> control.Waits:
        """Who waits for whom at this moment. Raises ManagerUnreachable, ProtocolError."""
        return await self._ask("GET", at, credentials, control.WAITS_PATH, control.Waits, MANAGER_ANSWER_S)

    async def drain(
        self,
        at: Address,
        credentials: ManagerCredentials,
        engine: str,
        deadline_s: float,
        reason: str,
        answer_s: float | None = None,
        *,
        ended: bool = False,
    ) -> bool:
        """Tells it that `engine` ends within `deadline_s`; False when it knows no such engine. `answer_s`: DRAIN_S.
        `ended`: for good.
        Raises ManagerUnreachable, ProtocolError."""
        deadline_s = min(deadline_s, control.MAX_DRAIN_SECONDS)
        reason = reason[:REASON_LENGTH] or "drain"
        request = control.DrainRequest(engine=engine, deadline_seconds=deadline_s, reason=reason, ended=ended)
        total_s = DRAIN_S if answer_s is None else answer_s
        answer = await self._ask("POST", at, credentials, control.DRAIN_PATH, control.DrainAnswer, total_s, request)
        return answer.known

    async def _ask(
        self,
        method: str,
        at: Address,
        credentials: ManagerCredentials,
        path: str,
        kind: type[T],
        total_s: float,
        body: control.DrainRequest | None = None,
    ) -> T:
        tls: dict[str, Any] = {}
        headers = {"Authorization": f"Bearer {credentials.token}"}
        if at.name:
            headers["Host"] = f"{at.name}:{at.port}"
            tls = {"ssl": _pinned(credentials.authority), "server_hostname": at.name}
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S)
        content = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                # A redirect would have the operator call whatever address a manager names.
                method,
                at.url + path,
                data=content,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                **tls,
            ) as response:
                text = await _bounded(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ManagerUnreachable(str(error)[:MAX_SHOWN] or type(error).__name__) from error
        if response.status != 200:
            raise ProtocolError(f"the manager answered {response.status} to {method} {path}: {text[:MAX_SHOWN]!r}")
        try:
            return msgspec.json.decode(text, type=kind)
        except UNDECODABLE as error:
            # It quotes what was found, which may be a megabyte.
            raise ProtocolError(f"the manager's answer is no {kind.__name__}: {str(error)[:MAX_SHOWN]}") from None


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The answer, if it is not longer than any of a manager's. Raises ProtocolError."""
    text = bytearray()
    async for data in response.content.iter_any():
        text += data
        if len(text) > MAX_ANSWER:
            response.close()
            raise ProtocolError(f"the manager's answer is longer than {MAX_ANSWER:,} bytes")
    return bytes(text)


def manager_session() -> aiohttp.ClientSession:
    """The session for all managers; its size is bounded by who asks. It inflates nothing: no manager of ours
    compresses, and two megabytes of another's may be two thousand."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=4)
    return aiohttp.ClientSession(
        connector=connector, trust_env=False, auto_decompress=False, headers={"Accept-Encoding": "identity"}
    )


@lru_cache(maxsize=CONTEXTS)
def _pinned(authority: str) -> ssl.SSLContext:
    """Trusts this authority alone. Raises ProtocolError for what is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=authority)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise ProtocolError(f"the authority of its certificate cannot be pinned: {error}") from None
    return context
