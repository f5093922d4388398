"""How long a killed manager is missed: `python benchmarks/manager/restart.py --kills 5` prints one JSON line.

10,000 live samples on 64 engines: real agents (see `restart_fleet`) that generate on while nobody listens, the real
trainer client, CURVE and journal on. The manager gets SIGKILL in full flow and is started again at once, as its runner
does. Seconds from the kill until it

    listens   has read its journal and says where it is
    flows     has all tokens that the engines have made since, and so goes on as if nothing had been

The manager's CPU seconds at both moments stand beside them: on a busy machine they say what an idle one would take.
A token that is generated twice, or an engine that is taken for lost, ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from drive import PROMPT_TOKENS
from stand import EPOCH, JOB, POLL_S, START_S

from polyrl.control import parse_endpoints
from polyrl.parent_death_signal import PARENT_PID
from polyrl.sample import Group, Purpose, SamplingParams
from polyrl.status import ManagerStatus
from polyrl.wire import pack_ids
from polyrl_cli.local.manager import LocalManager
from polyrl_operator.secret import write_run_keys
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.weights.publisher import WeightPublisher

FLEET: Final = Path(__file__).with_name("restart_fleet.py")
N: Final = 8
BUDGET: Final = 60_000
"""Tokens per sample: none ends while this runs."""
RATE_S: Final = 5.0
"""Over which the flow before a kill is measured."""
SETTLE_S: Final = 10.0
"""After the heads of nearly all samples have come: the last ones must not count as flow."""
CAUGHT_UP: Final = 0.98
"""Share of what the engines must have made by now: the rest is what gathers in agents at any moment."""
FLOW_S: Final = 120.0


class Bench:
    """One run folder, its manager of the moment, its status as it comes."""

    def __init__(self, folder: Path) -> None:
        write_run_keys(folder / "keys")
        (folder / "job.json").write_text(json.dumps(JOB))
        self.folder = folder
        self.file = folder / "manager.json"
        self.status = ManagerStatus(seq=-1, run_epoch=EPOCH)
        self.process: asyncio.subprocess.Process | None = None

    async def start_manager(self) -> None:
        """Returns at once."""
        command = ["-m", "polyrl_rollout.manager", "--job", str(self.folder / "job.json"), "--epoch", str(EPOCH)]
        command += ["--keys", str(self.folder / "keys/manager.key"), "--endpoints", str(self.file)]
        command += ["--journal", str(self.folder / "journal.sqlite")]
        self.process = await self._start(command)

    async def start_fleet(self, engines: int, streams: int, pace: float, head: int) -> asyncio.subprocess.Process:
        return await self._start([str(FLEET), str(self.folder), *map(str, (engines, streams, pace, head))])

    async def listens(self) -> None:
        """Once the endpoints file is that of the manager of the moment."""
        assert self.process is not None
        async with asyncio.timeout(START_S):
            while not self.file.exists() or _pid_in(self.file) != self.process.pid:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def watch(self) -> None:
        async with LocalManager(self.file, self.folder / "keys/operator.key", EPOCH) as client:
            await client.find()
            async for status in client.watch():
                self.status = status

    async def until_live(self, samples: int) -> None:
        async with asyncio.timeout(FLOW_S):
            while sum(engine.running for engine in self.status.engines) < samples:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    def cpu_s(self) -> float:
        """Of the manager of the moment: user and system, all threads."""
        assert self.process is not None
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    async def _start(self, arguments: list[str]) -> asyncio.subprocess.Process:
        environment = {**os.environ, PARENT_PID: str(os.getpid())}
        with (self.folder / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, *arguments, env=environment, stdout=log, stderr=log
            )


def _pid_in(file: Path) -> int:
    return parse_endpoints(file.read_bytes(), str(file)).pid


async def kill_once(bench: Bench) -> tuple[float, float, float, float]:
    """Seconds until it listens, and until it flows; the new manager's CPU seconds at both moments."""
    before, began = bench.status.tokens.generated, time.monotonic()
    await asyncio.sleep(RATE_S)
    assert bench.process is not None
    killed, at_kill, lost = time.monotonic(), bench.status.tokens.generated, bench.status.engines_lost
    rate = (at_kill - before) / (killed - began)
    bench.process.send_signal(signal.SIGKILL)
    await bench.process.wait()
    await bench.start_manager()
    await bench.listens()
    listens, cpu = time.monotonic() - killed, bench.cpu_s()
    async with asyncio.timeout(FLOW_S):
        while bench.status.tokens.generated < at_kill + CAUGHT_UP * rate * (time.monotonic() - killed):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    flows = time.monotonic() - killed
    lost = bench.status.engines_lost - lost
    if bench.status.tokens.regenerated or lost:
        raise SystemExit(f"the restart cost tokens or engines: {bench.status.tokens}, {lost} engines lost")
    return listens, flows, cpu, bench.cpu_s()


@asynccontextmanager
async def working(bench: Bench, engines: int, streams: int, pace: float, head: int) -> AsyncIterator[None]:
    """Everything at work: all samples live, and `head` tokens of each accepted."""
    await bench.start_manager()
    await bench.listens()
    fleet = await bench.start_fleet(engines, streams, pace, head)
    publisher = WeightPublisher(bench.folder / "keys/trainer.key")
    watching = asyncio.create_task(bench.watch())
    try:
        async with RolloutClient.connect(bench.file, bench.folder / "keys/trainer.key", EPOCH) as client:
            await _submit(client, publisher, engines * streams // N)
            await bench.until_live(engines * streams)
            async with asyncio.timeout(FLOW_S):
                while bench.status.tokens.generated < engines * streams * head:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
            await asyncio.sleep(SETTLE_S)
            yield
    finally:
        watching.cancel()
        for process in (fleet, bench.process):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        await asyncio.to_thread(publisher.close)


async def _submit(client: RolloutClient, publisher: WeightPublisher, groups: int) -> None:
    tensors = {"weight": torch.zeros(8)}
    published = await asyncio.to_thread(publisher.publish, 0, tensors.items(), {"config.json": b"{}"})
    await client.publish(published)
    prompt = pack_ids(range(PROMPT_TOKENS))
    sampling = SamplingParams(BUDGET)
    await client.submit(
        [
            Group(
                number,
                0,
                purpose=Purpose.TRAIN,
                prompt_ids=prompt,
                n=N,
                sampling=sampling,
                min_version=0,
                max_version=0,
            )
            for number in range(groups)
        ]
    )


async def measure(engines: int, streams: int, pace: float, head: int, kills: int) -> dict[str, Any]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        async with working(bench, engines, streams, pace, head):
            seconds = [await kill_once(bench) for _ in range(kills)]
            journal = sum(path.stat().st_size for path in bench.folder.glob("journal.sqlite*"))
    columns = [(round(statistics.median(column), 2), round(max(column), 2)) for column in zip(*seconds, strict=True)]
    return {
        "liveSamples": engines * streams,
        "engines": engines,
        "tokensPerSecond": round(engines * streams * pace),
        "tokensHeldPerSampleAtLeast": head,
        "kills": kills,
        "secondsToListen": columns[0],
        "secondsToFullFlow": columns[1],
        "managerCpuSecondsToListen": columns[2],
        "managerCpuSecondsToFullFlow": columns[3],
        "tokensGeneratedTwice": bench.status.tokens.regenerated,
        "journalMb": round(journal / 1e6, 1),
    }


def main() -> None:
    """Median and maximum over the kills."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--streams", type=int, default=160, help="samples on each engine")
    parser.add_argument("--pace", type=float, default=2.0, help="tokens per second of each sample")
    parser.add_argument("--head", type=int, default=200, help="tokens that each sample has at the first kill")
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    figures = asyncio.run(measure(args.engines, args.streams, args.pace, args.head, args.kills))
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
