"""The operator at scale: N jobs of five pods, then one job of many rollouts; what it takes, and what it costs at rest.

    .venv/bin/python benchmarks/operator/run.py --jobs 1000 --floor 200 --one 500

From KUBEBUILDER_ASSETS it starts etcd and an API server, and, where that folder holds them, scheduler, job controller
and kwok, whose fake nodes run the pods; else stand-ins in this process do. With --kubeconfig it uses a cluster that is
there.
Prints one JSON object:

    seconds           from the operator's start until half, nine tenths, all jobs say that their pods are ready
    cpuSeconds        over that time, by program; start: what the operator took before it looked at anything
    requestsPerJob    by verb, of the operator alone;  rssMiB: highest;  idleCpu: share of a core afterwards
    cores             busy in all over that time: more than the programs' own is neighbours'
    floor             a plain client that makes the same objects (see `floor`)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from control_plane import NEEDED, ROOT, ControlPlane
from deployed import Deployed, deployed
from floor import floor
from kubernetes.aio.client.api_client import ApiClient
from statuses import Statuses

from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.connect import load_configuration, stream_session
from polyrl_operator.api.kinds import JOB
from polyrl_operator.testing.fake_nodes import FakeNodes

NAMESPACE: Final = "operator-benchmark"
FLOOR_NAMESPACE: Final = "operator-benchmark-floor"
ROLLOUTS: Final = 3
"""Per job; with its manager and its trainer five pods."""
ASSETS: Final = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
START_S: Final = 60.0
POLL_S: Final = 1.0
IDLE_S: Final = 30.0
"""Over which the rest is measured, after a pause of a third of it."""
SIDE_BY_SIDE: Final = 16


def job(name: str, rollouts: int, most: int, namespace: str = NAMESPACE) -> dict[str, Any]:
    recipe = {
        "mode": "rl",
        "model": {"path": "model"},
        "data": {"rl": [{"path": "prompts.jsonl"}]},
        "reward": {"function": "rewards:exact"},
        "algorithm": {"steps": 4},
    }
    rollout = {"replicas": rollouts, "minReplicas": 0, "maxReplicas": most, "drainSeconds": 1}
    return {
        "apiVersion": JOB.api_version,
        "kind": JOB.name,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"recipe": recipe, "rollout": rollout, "scaling": {"mode": "Manual"}},
    }


class Bench:
    """One run. `plane` is None when the cluster is somebody else's."""

    def __init__(self, client: Client, statuses: Statuses, kubeconfig: Path, plane: ControlPlane | None) -> None:
        self.client, self.statuses, self.kubeconfig, self.plane = client, statuses, kubeconfig, plane
        self._slots = asyncio.Semaphore(SIDE_BY_SIDE)

    async def prepare(self) -> None:
        """CRD and namespaces."""
        kubectl = shutil.which("kubectl", path=f"{ASSETS}:{os.environ['PATH']}") or "kubectl"
        crd = f"apply --server-side -f {ROOT}/crds/polyrljobs.yaml"
        for words in (crd, f"create namespace {NAMESPACE}", f"create namespace {FLOOR_NAMESPACE}"):
            command = [kubectl, f"--kubeconfig={self.kubeconfig}", *words.split()]
            process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
            if await process.wait():
                raise SystemExit(f"kubectl {words} failed")
        async with asyncio.timeout(START_S):
            while True:
                with suppress(ApiError):
                    await self.client.get(JOB, NAMESPACE, "none")
                    return
                await asyncio.sleep(POLL_S)

    async def submit(self, wanted: list[dict[str, Any]]) -> None:
        async def one(item: dict[str, Any]) -> None:
            async with self._slots:
                await self.client.create(item)

        await asyncio.gather(*(one(item) for item in wanted))

    def cpu(self, operator: Deployed | None = None) -> dict[str, float]:
        """Seconds so far by program, and of all cores: `busy`."""
        busy = psutil.cpu_times()
        used = {} if self.plane is None else self.plane.cpu_seconds()
        used |= {"benchmark": sum(psutil.Process().cpu_times()[:2])}
        used |= {} if operator is None else {"operator": operator.cpu()}
        return used | {"busy": sum(busy) - busy.idle - busy.iowait}

    async def grow(self, operator: Deployed, jobs: int, deadline_s: float) -> dict[str, Any]:
        """All jobs, which are there already."""
        before, began = self.cpu() | {"operator": 0.0}, time.monotonic()
        took = await self.statuses.until_ready(ROLLOUTS, jobs, deadline_s)
        used = _since(before, self.cpu(operator))
        asked, turns = await operator.counts()
        own = used["operator"] - operator.start_cpu
        return {
            "seconds": took,
            "cpuSeconds": {"start": round(operator.start_cpu, 1)} | {name: round(one, 1) for name, one in used.items()},
            "operatorCpuMillisPerJob": round(1000 * own / jobs, 1),
            "cores": round(used["busy"] / (time.monotonic() - began), 1),
            "requestsPerJob": {what: round(one / jobs, 2) for what, one in asked.most_common() if one >= jobs / 20},
            "requestsPerJobInAll": round(sum(asked.values()) / jobs, 1),
            "turnsPerJob": round(turns / jobs, 1),
        }

    async def rest(self, operator: Deployed) -> float:
        """Share of a core when nothing happens."""
        await asyncio.sleep(IDLE_S / 3)
        before = operator.cpu()
        await asyncio.sleep(IDLE_S)
        return round((operator.cpu() - before) / IDLE_S, 4)

    async def one_large(self, operator: Deployed, rollouts: int, deadline_s: float) -> dict[str, Any]:
        """One job from no rollout to many and back."""
        name, took = "many", {}
        await self.submit([job(name, 0, rollouts)])
        await self.statuses.until_ready(0, 1, deadline_s, name)
        for what, wanted in (("grow", rollouts), ("shrink", 0)):
            before, turns = operator.cpu(), await operator.turns()
            await self.client.patch(JOB, NAMESPACE, name, {"spec": {"rollout": {"replicas": wanted}}})
            seconds = (await self.statuses.until_ready(wanted, 1, deadline_s, name))["all"]
            used, turns = operator.cpu() - before, await operator.turns() - turns
            within = {f"turnsWithin{limit}s": turns[f"{limit}.0"] for limit in (1, 2)}
            took[what] = {"seconds": seconds, "operatorCpuSeconds": round(used, 2), "turns": turns["+Inf"]} | within
        return {"rollouts": rollouts, **took}


async def measure(bench: Bench, args: argparse.Namespace, session: aiohttp.ClientSession, host: str) -> dict[str, Any]:
    await bench.prepare()
    following = asyncio.create_task(bench.statuses.follow())
    found: dict[str, Any] = {"jobs": args.jobs, "nodes": args.nodes}
    if args.floor:
        before = bench.cpu()
        plain = [job(f"job-{number}", ROLLOUTS, ROLLOUTS, FLOOR_NAMESPACE) for number in range(args.floor)]
        found["floor"] = await floor(session, host, plain)
        found["floor"]["cpuSeconds"] = {name: round(one, 1) for name, one in _since(before, bench.cpu()).items()}
    await bench.submit([job(f"job-{number}", ROLLOUTS, ROLLOUTS) for number in range(args.jobs)])
    async with deployed(bench.kubeconfig, NAMESPACE) as operator:
        watching = asyncio.create_task(operator.watch_memory())
        found |= await bench.grow(operator, args.jobs, args.deadline)
        found["idleCpu"] = await bench.rest(operator)
        found["one"] = await bench.one_large(operator, args.one, args.deadline) if args.one else None
        found["rssMiB"] = round(operator.rss / 2**20)
        await ended(watching)
    await ended(following)
    return found


def _since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: used - before.get(name, 0.0) for name, used in after.items()}


async def main(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        plane = None if args.kubeconfig else control_plane(stack)
        kubeconfig = args.kubeconfig or plane.kubeconfig()
        configuration = await load_configuration(kubeconfig)
        api = await stack.enter_async_context(ApiClient(configuration))
        client = Client(api, field_manager="benchmark")
        session = await stack.enter_async_context(stream_session(configuration))
        args.nodes = "the cluster's"
        if plane is not None and all((ASSETS / name).is_file() for name in NEEDED):
            args.nodes = "kwok's"
            plane.add_nodes()
        elif plane is not None:
            args.nodes = "stand-ins in this process"
            playing = asyncio.create_task(FakeNodes(client, session, configuration.host).play())
            stack.push_async_callback(ended, playing)
        statuses = Statuses(session, configuration.host, NAMESPACE)
        bench = Bench(client, statuses, kubeconfig, plane)
        print(json.dumps(await measure(bench, args, session, configuration.host), indent=1))


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def control_plane(stack: AsyncExitStack) -> ControlPlane:
    """Started; it ends with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    plane = ControlPlane(ASSETS, folder)
    stack.callback(plane.stop)
    plane.start()
    return plane


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="of five pods each (default 1000)")
    parser.add_argument("--one", type=int, default=500, help="rollouts of the large job (default 500; 0: none)")
    parser.add_argument("--floor", type=int, default=0, help="jobs that a plain client makes first (default 0)")
    parser.add_argument("--deadline", type=float, default=600, metavar="S", help="of each phase (default 600)")
    parser.add_argument("--kubeconfig", type=Path, help="a cluster whose own nodes, or kwok's, run the pods")
    # Whoever ends it, what it started ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asyncio.run(main(parser.parse_args()))
