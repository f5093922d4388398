"""What its checks cost a manager under load: their CPU seconds beside all of its own, turn by turn of one run.

The manager is whole: sockets with CURVE, sessions, ledger, journal, HTTP; agents and trainer are another process
(`benchmarks/manager/drive.py`), whose CPU is not counted. Each frame has ten tokens of each of sixteen samples.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import psutil
import zmq.asyncio

BENCHMARKS: Final = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS / "manager")]

from drive import Drive, connected  # noqa: E402
from loads import Load  # noqa: E402
from stand import EPOCH, JOB, START_S, Stand  # noqa: E402

from polyrl.control import parse_endpoints  # noqa: E402
from polyrl.keys import ManagerKeys, read_keys  # noqa: E402
from polyrl.ledger import Ledger, LedgerConfig  # noqa: E402
from polyrl.weights import WeightsRef  # noqa: E402
from polyrl_operator.secret import write_run_keys  # noqa: E402
from polyrl_rollout.manager.journal import Journal  # noqa: E402
from polyrl_rollout.manager.server import Listen, Manager  # noqa: E402

LOAD: Final = Load(engines=8, groups=16, n=8, tokens=400_000, limit_s=3600.0)
TURN_S: Final = 0.1
ENDPOINTS: Final = "manager.json"
WARM_TOKENS: Final = 200_000
VOCABULARY: Final = 1 << 31


class Running:
    """A manager under load."""

    def __init__(self, ledger: Ledger, driver: asyncio.subprocess.Process) -> None:
        self._ledger, self._driver = ledger, driver

    @property
    def tokens(self) -> int:
        return self._ledger.state.counters.tokens_accepted

    async def turn(self) -> float:
        """CPU seconds of one in which tokens came."""
        cpu, tokens = time.process_time(), self.tokens
        until = time.monotonic() + START_S
        while self.tokens == tokens or time.process_time() - cpu < TURN_S:
            if self._driver.returncode is not None or time.monotonic() > until:
                raise SystemExit("no tokens come: the driver has ended or hangs")
            await asyncio.sleep(TURN_S / 4)
        return time.process_time() - cpu


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    """With agents that send as fast as it keeps what it got."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run_keys(folder / "keys")
        ledger = Ledger(LedgerConfig(run_epoch=EPOCH))
        keys, journal = (
            read_keys(ManagerKeys, folder / "keys" / "manager.key"),
            Journal(folder / "journal.sqlite", EPOCH),
        )
        async with Manager(ledger, keys, EPOCH, Listen(), journal) as manager:
            serving = asyncio.create_task(manager.run())
            (folder / "job.json").write_text(json.dumps(JOB))
            (folder / ENDPOINTS).write_bytes(msgspec.json.encode(manager.endpoints))
            driver = await asyncio.create_subprocess_exec(sys.executable, __file__, name)
            try:
                found = Running(ledger, driver)
                while found.tokens < WARM_TOKENS:
                    await found.turn()
                yield found
            finally:
                driver.kill()
                await driver.wait()
                manager.stop()
                await serving


class OwnTime:
    """CPU seconds that some functions take, of the thread that calls them.

    Every other call is timed, and before each of the others nothing is, at the same place: what timing itself takes is
    left out. It takes several times as much there, where its code is in no cache, as in a loop.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        turns = itertools.cycle((True, False))

        def timed(*args: Any, **named: Any) -> Any:
            if next(turns):
                began = time.thread_time()
                try:
                    return function(*args, **named)
                finally:
                    self.seconds += 2 * (time.thread_time() - began)
            began = time.thread_time()
            self._nothing()
            self.seconds -= 2 * (time.thread_time() - began)
            return function(*args, **named)

        return timed

    @staticmethod
    def _nothing() -> None:
        """Takes what a call takes."""


async def cpu_ratios(rounds: int, checks: Sequence[tuple[object, str]]) -> list[float]:
    """All CPU over what it is without the checks, turn by turn. A turn with them and one without differ by more than
    they cost: frames are of other sizes, and the disk has its own times."""
    own, found = OwnTime(), []
    with ExitStack() as patched:
        for place, name in checks:
            patched.enter_context(mock.patch.object(place, name, own.of(getattr(place, name))))
        async with running() as manager:
            for _ in range(rounds):
                before, seconds = own.seconds, await manager.turn()
                found.append(seconds / (seconds - (own.seconds - before)))
    return found


async def drive(folder: Path) -> None:
    """The other process: agents and trainer, until it is ended."""
    endpoints = parse_endpoints((folder / ENDPOINTS).read_bytes(), ENDPOINTS)
    stand = Stand(psutil.Process(), endpoints, folder=folder)
    async with connected(stand) as client:
        where = WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b"", vocabulary=VOCABULARY)
        await client.publish(where)
        load = Drive(LOAD, stand, client, zmq.asyncio.Context())
        await load.submit()
        await load.take()


if __name__ == "__main__":
    asyncio.run(drive(Path(sys.argv[1])))
