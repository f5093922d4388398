"""The manager of a run on this machine: finds it by its endpoints file, follows its status, sends it requests.

A manager that does not answer is asked again until the watcher is cancelled; whether it is dead is the fleet's to say,
not a timeout's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from polyrl.control import Endpoints, Waits, parse_endpoints
from polyrl.errors import ProtocolError
from polyrl.keys import OperatorKeys, read_keys
from polyrl.status import ManagerStatus
from polyrl_cli.local.ownership import require_own
from polyrl_cli.local.run_folder import RunFolder
from polyrl_operator.managers.client import Address, ManagerClient, ManagerUnreachable, manager_session
from polyrl_operator.secret import AUTHORITY, LOCAL_NAME, ManagerCredentials

ENDPOINTS_POLL_S: Final = 0.05
"""Between checks for the endpoints file, which appears about a second after the start; nothing announces a file."""

STATUS_WAIT_S: Final = 10.0
"""How long one long-poll waits for a change."""

DRAIN_ANSWER_S: Final = 15.0
"""What a busy manager may take to answer a drain, which is sent once."""

TURNS_S: Final = 0.01
"""Some turns of the loop."""

RETRY_S: Final = 0.5
"""Between a failed request and the next one."""


def manager_of(folder: RunFolder) -> LocalManager:
    """Manager of a live run. Raises UserError where the folder is not wholly this account's: it would name an address
    of somebody else's liking, and a link for a key would hand a token over; FileNotFoundError before there is one."""
    require_own(folder.root, folder.lock, folder.endpoints.parent, folder.endpoints)
    endpoints = parse_endpoints(folder.endpoints.read_bytes(), str(folder.endpoints))
    key = folder.keys / "operator.key"
    require_own(folder.keys, key, folder.keys / AUTHORITY)
    return LocalManager(folder.endpoints, key, endpoints.run_epoch)


class LocalManager:
    """One run's manager. Use as an async context manager, and `find` it before anything else."""

    def __init__(self, endpoints_file: Path, operator_key: Path, run_epoch: int) -> None:
        self._file, self._run_epoch = endpoints_file, run_epoch
        # Whoever binds a dead manager's port has no certificate of this run, so it gets no token.
        authority = operator_key.with_name(AUTHORITY).read_text()
        self._credentials = ManagerCredentials(read_keys(OperatorKeys, operator_key).http_token, authority)
        self._client: ManagerClient
        self._address: Address

    async def __aenter__(self) -> Self:
        self._session = manager_session()
        self._client = ManagerClient(self._session)
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._session.close()
        # Its encrypted connections end in the loop's next turns, which the last command of a process would not make.
        await asyncio.sleep(TURNS_S)

    async def find(self) -> Endpoints:
        """Waits until this run epoch's manager has written where it listens; cancel it at the deadline."""
        while True:
            if self._file.exists():
                endpoints = parse_endpoints(self._file.read_bytes(), str(self._file))
                if endpoints.run_epoch == self._run_epoch:
                    url = urlsplit(endpoints.http)
                    _require_here(url.hostname or "", self._file)
                    name = LOCAL_NAME if url.scheme == "https" else ""
                    self._address = Address(url.hostname or "", url.port or 80, name=name)
                    return endpoints
            await asyncio.sleep(ENDPOINTS_POLL_S)

    async def watch(self) -> AsyncIterator[ManagerStatus]:
        """Every new status, as often as the manager publishes one (five times a second at most), until cancelled.
        Raises ProtocolError when the manager refuses."""
        seq = -1
        while True:
            try:
                status = await self._client.status(self._address, self._credentials, seq, STATUS_WAIT_S)
            except ManagerUnreachable:
                # A successor listens elsewhere and counts anew.
                seq = -1
                await asyncio.sleep(RETRY_S)
                await self.find()
                continue
            if status.seq != seq:
                seq = status.seq
                yield status

    async def drain(self, engine: str, deadline_s: float, reason: str) -> bool:
        """Reports that `engine` ends within `deadline_s`; False when the manager does not know it or does not answer.
        Raises ProtocolError when the manager refuses."""
        at, credentials = self._address, self._credentials
        try:
            return await self._client.drain(at, credentials, engine, deadline_s, reason, DRAIN_ANSWER_S)
        except ManagerUnreachable:
            return False

    async def waits(self) -> Waits | None:
        """Who waits for whom at this moment; None when the manager does not answer."""
        try:
            return await self._client.waits(self._address, self._credentials)
        except ManagerUnreachable:
            return None


def _require_here(host: str, file: Path) -> None:
    """Raises ProtocolError for an address of another machine: managers of this one listen on its loopback interface."""
    try:
        here = ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost"
    if not here:
        raise ProtocolError(f"{file}: names {host}, which is not this machine")
