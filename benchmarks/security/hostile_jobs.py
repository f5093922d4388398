"""Hostile PolyRLJobs by the hundred thousand against the operator's own process, with honest ones among them.

    .venv/bin/python benchmarks/security/hostile_jobs.py --bodies 100000 --seed 0 --out hostile-jobs.svg

Hostile jobs are of one namespace, honest ones of another; with `--together` all are of one. Each body is drawn by the
seed and is another than all before: too deep, too wide, too long, of wrong types, with odd text and numbers. They
come by watches and by lists, of a server in this process that stores whatever it is sent, since a real one refuses
the worst. A hostile job is deleted once its status was written. Beside them an honest one comes each HONEST_S; its
latency is the time from its creation until its status was written. Plots RSS and latency, and prints as the last line
one JSON object:

    bodies, distinct   sent, and different from each other
    statuses           hostile jobs whose condition the operator wrote; unanswered: none within ANSWER_S
    latency            of honest jobs: how many, p50, p99 and longest, seconds; quiet: the median before the flood
    rssMiB             of the operator: before, highest, at the end
    cpuMsPerBody, alive, wallSeconds
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import psutil

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from api_server import FakeApiServer  # noqa: E402

from polyrl.testing.job_values import raw_job  # noqa: E402
from tests.security.hostile_jobs import hostile_job  # noqa: E402

NAMESPACES: Final = ("flood", "honest")
HONEST_S: Final = 1.0
QUIET_JOBS: Final = 5
"""Honest jobs before the first hostile one."""
IN_FLIGHT: Final = 32
"""Hostile jobs that have no status yet, at most."""
ANSWER_S: Final = 30.0
"""Until then a hostile job must have its condition."""
RSS_S: Final = 0.25
START_S: Final = 60.0
RATE_S: Final = 10.0
"""Between lines of progress."""


HONEST: Final = json.dumps({key: value for key, value in raw_job().items() if key != "metadata"})[1:-1]


@dataclass
class Load:
    """What came of it."""

    sent: int = 0
    statuses: int = 0
    unanswered: int = 0
    distinct: set[bytes] = field(default_factory=set)
    latency: list[tuple[float, float]] = field(default_factory=list)
    """When an honest job came, and how long it waited, in seconds."""
    rss: list[tuple[float, float]] = field(default_factory=list)
    """When, and MiB."""


class Flood:
    """Sends all of it, and keeps count."""

    def __init__(self, seed: int, *, together: bool) -> None:
        self._honest = NAMESPACES[0 if together else 1]
        self._draw = random.Random(seed)
        self._good = raw_job()
        self._waiting: dict[str, asyncio.Future[float]] = {}
        self.server = FakeApiServer(NAMESPACES, self._on_status)
        self.load = Load()
        self.began = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.began

    def _on_status(self, name: str, status: str) -> None:
        waits = self._waiting.pop(name, None)
        if waits is not None and not waits.done() and '"Accepted"' in status:
            waits.set_result(self.now())

    async def answered(self, namespace: str, name: str, rest: str, *, deadline_s: float) -> float | None:
        """Seconds until its status was written; None if it was not in time. It is gone afterwards."""
        self._waiting[name] = asyncio.get_running_loop().create_future()
        future, began = self._waiting[name], self.now()
        await self.server.put_job(namespace, name, rest)
        try:
            return await asyncio.wait_for(future, deadline_s) - began
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(name, None)
            await self.server.delete_of(namespace, name)

    async def honest(self, number: int, deadline_s: float = ANSWER_S) -> None:
        began = self.now()
        waited = await self.answered(self._honest, f"honest-{number}", HONEST, deadline_s=deadline_s)
        self.load.latency.append((began, deadline_s if waited is None else waited))

    async def hostile(self, name: str, rest: str, slots: asyncio.Semaphore) -> None:
        try:
            waited = await self.answered(NAMESPACES[0], name, rest, deadline_s=ANSWER_S)
            self.load.statuses += waited is not None
            self.load.unanswered += waited is None
        finally:
            slots.release()

    async def run(self, bodies: int, seconds: float) -> None:
        began = self.now()
        slots, tasks = asyncio.Semaphore(IN_FLIGHT), set[asyncio.Task[None]]()
        while self.load.sent < bodies and self.now() - began < seconds:
            rest = self.body()
            key = blake2b(rest.encode(), digest_size=12).digest()
            if key in self.load.distinct:
                continue
            self.load.distinct.add(key)
            await slots.acquire()
            self.load.sent += 1
            task = asyncio.create_task(self.hostile(f"hostile-{self.load.sent}", rest, slots))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    def body(self) -> str:
        """All but its metadata."""
        text = hostile_job(self._draw, "HEAD", self._good)
        decoder = json.JSONDecoder()
        at = text.index('"metadata": ') + len('"metadata": ')
        _, end = decoder.raw_decode(text, at)
        return (text[1 : text.index('"metadata"')] + text[end:].lstrip(", ")).rstrip().removesuffix("}")


async def start_operator(url: str, folder: Path) -> asyncio.subprocess.Process:
    kubeconfig = folder / "kubeconfig"
    place = {"name": "fake", "cluster": {"server": url}}
    context = {"name": "fake", "context": {"cluster": "fake", "user": "fake"}}
    users = [{"name": "fake", "user": {"token": "none"}}]
    config = {"clusters": [place], "contexts": [context], "users": users, "current-context": "fake"}
    kubeconfig.write_text(json.dumps({"apiVersion": "v1", "kind": "Config"} | config))
    command = [sys.executable, "-m", "polyrl_operator", "--all-namespaces", "--no-nodes", "--host=127.0.0.1"]
    command += ["--metrics-port=0", "--health-port=0", "--manager-image=m", "--trainer-image=t", "--rollout-image=r"]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "POD_NAME": "one"}
    with (folder / "log").open("wb") as log:
        return await asyncio.create_subprocess_exec(*command, env=environment, stderr=log)


async def watch_rss(flood: Flood, process: psutil.Process) -> None:
    while True:
        flood.load.rss.append((flood.now(), process.memory_info().rss / 2**20))
        await asyncio.sleep(RSS_S)


async def honest_jobs(flood: Flood) -> None:
    number = QUIET_JOBS
    while True:
        await flood.honest(number := number + 1)
        await asyncio.sleep(HONEST_S)


async def progress(flood: Flood, bodies: int) -> None:
    while True:
        await asyncio.sleep(RATE_S)
        load = flood.load
        print(f"{flood.now():7.0f} s  {load.sent:7d} of {bodies}  {load.rss[-1][1]:.0f} MiB", file=sys.stderr)


async def measure(bodies: int, flood: Flood, seconds: float, folder: Path) -> tuple[dict[str, Any], Load]:
    process = await start_operator(await flood.server.start(), folder)
    seen = psutil.Process(process.pid)
    try:
        await flood.honest(0, START_S)
        assert flood.load.latency.pop()[1] < START_S, (folder / "log").read_text()[-3000:]
        for number in range(1, QUIET_JOBS + 1):
            await flood.honest(number)
        quiet, before = statistics.median(waited for _, waited in flood.load.latency), seen.memory_info().rss
        flood.load.latency.clear()
        cpu, began = sum(seen.cpu_times()[:2]), flood.now()
        beside = [
            asyncio.create_task(one) for one in (watch_rss(flood, seen), honest_jobs(flood), progress(flood, bodies))
        ]
        await flood.run(bodies, seconds)
        for task in beside:
            task.cancel()
        wall, spent = flood.now() - began, sum(seen.cpu_times()[:2]) - cpu
        figures = figures_of(flood.load, quiet) | {"wallSeconds": round(wall, 1)}
        figures["rssMiB"] = {"before": before >> 20, "highest": round(max(m for _, m in flood.load.rss)),
                             "end": seen.memory_info().rss >> 20}  # fmt: skip
        figures |= {"cpuMsPerBody": round(1000 * spent / flood.load.sent, 2), "alive": process.returncode is None}
        return figures, flood.load
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await flood.server.stop()


def figures_of(load: Load, quiet: float) -> dict[str, Any]:
    waits = sorted(waited for _, waited in load.latency)
    latency = {
        "jobs": len(waits),
        "quiet": round(quiet, 3),
        "p50": round(statistics.median(waits), 3),
        "p99": round(waits[len(waits) * 99 // 100], 3),
        "longest": round(waits[-1], 3),
    }
    counts = {"bodies": load.sent, "distinct": len(load.distinct)}
    return counts | {"statuses": load.statuses, "unanswered": load.unanswered, "latency": latency}


def plot(load: Load, out: Path) -> None:
    """RSS above, latency of honest jobs below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    memory, waits = figure.subplots(2, sharex=True)
    memory.plot(*zip(*load.rss, strict=True))
    memory.set(ylabel="operator's RSS, MiB", ylim=(0, None))
    waits.plot(*zip(*load.latency, strict=True), ".")
    waits.set(ylabel="until an honest job's status, s", xlabel="seconds", ylim=(0, None))
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="no more is sent then")
    parser.add_argument("--together", action="store_true", help="honest jobs in the hostile ones' namespace")
    parser.add_argument("--out", type=Path, help="the picture, by its ending .svg or .png")
    given = parser.parse_args()
    flood = Flood(given.seed, together=given.together)
    with tempfile.TemporaryDirectory() as folder:
        figures, load = asyncio.run(measure(given.bodies, flood, 60 * given.minutes, Path(folder)))
    if given.out is not None:
        plot(load, given.out)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
