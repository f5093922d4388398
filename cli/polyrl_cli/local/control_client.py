"""The runner's side of the manager's HTTP API: finds it, follows its status, asks who waits, asks it to drain.

Watching is a long-poll: the manager answers when something changes. A manager that does not answer is asked again until
the watcher is cancelled; whether it is dead is the fleet's to say, not a timeout's.

Refuses to hold: what the status means. Read next: `polyrl.control`, `polyrl.status`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec

from polyrl.control import (
    DRAIN_PATH,
    STATUS_PATH,
    WAITS_PATH,
    DrainAnswer,
    DrainRequest,
    Endpoints,
    Waits,
    parse_endpoints,
)
from polyrl.errors import ProtocolError
from polyrl.keys import OperatorKeys, read_keys
from polyrl.status import ManagerStatus

ENDPOINTS_LOOK_S: Final = 0.05
"""Between looks for the endpoints file: it comes once, about a second after the start; nothing announces a file."""

STATUS_WAIT_S: Final = 10.0
"""How long one long-poll waits for a change."""

ANSWER_SLACK_S: Final = 5.0
"""What a busy manager may take beyond the wait before a request counts as failed."""

RETRY_S: Final = 0.5
"""Between a failed request and the next one."""


class ControlClient:
    """One manager, one token. Use as an async context manager."""

    def __init__(self, endpoints_file: Path, operator_key: Path, epoch: int) -> None:
        self._file, self._epoch = endpoints_file, epoch
        token = read_keys(OperatorKeys, operator_key).http_token
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        self._url = ""

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=STATUS_WAIT_S + ANSWER_SLACK_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def find(self) -> Endpoints:
        """Waits until this epoch's manager has said where it listens; cancel it at the deadline."""
        while True:
            if self._file.exists():
                endpoints = parse_endpoints(self._file.read_bytes(), str(self._file))
                if endpoints.epoch == self._epoch:
                    self._url = endpoints.http
                    return endpoints
            await asyncio.sleep(ENDPOINTS_LOOK_S)

    async def watch(self) -> AsyncIterator[ManagerStatus]:
        """Every new status, as often as the manager publishes one (five times a second at most), until cancelled."""
        seq = -1
        while True:
            status = await self._status(seq)
            if status is None:
                # A successor listens elsewhere and counts anew.
                seq = -1
                await asyncio.sleep(RETRY_S)
                await self.find()
            elif status.seq != seq:
                seq = status.seq
                yield status

    async def drain(self, engine: str, deadline_s: float, reason: str) -> bool:
        """Tells the manager that `engine` ends within `deadline_s`; False when the manager does not know or answer."""
        body = msgspec.json.encode(DrainRequest(engine=engine, deadline_seconds=deadline_s, reason=reason))
        answer = await self._ask("POST", DRAIN_PATH, body=body)
        return answer is not None and msgspec.json.decode(answer, type=DrainAnswer).known

    async def waits(self) -> Waits | None:
        """Who waits for whom at this moment; None when the manager does not answer."""
        answer = await self._ask("GET", WAITS_PATH)
        return None if answer is None else msgspec.json.decode(answer, type=Waits)

    async def _status(self, since: int) -> ManagerStatus | None:
        answer = await self._ask("GET", f"{STATUS_PATH}?since={since}&waitSeconds={STATUS_WAIT_S:g}")
        return None if answer is None else msgspec.json.decode(answer, type=ManagerStatus)

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes | None:
        """The answer's body; None when the manager is not there. Raises ProtocolError when it refuses."""
        if self._session is None:
            raise RuntimeError("ControlClient is used outside its context")
        try:
            async with self._session.request(method, self._url + path, data=body) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return None
        if response.status >= 400:
            raise ProtocolError(f"the manager answered {response.status} to {method} {path}: {text[:200]!r}")
        return text
