"""The operator at scale: N jobs of five pods, then one job of many rollouts; what it takes, and what it costs at rest.

Without --kubeconfig it starts a bare API server from KUBEBUILDER_ASSETS, and stand-ins for nodes in this process play
pods and trainers; with one, the cluster's own (kwok's fake nodes, say) do. Prints one JSON object.

    seconds           from the operator's start until every job has its children and its pods run, as statuses say
    requestsPerJob    by verb, of the operator alone
    rssMiB            highest, of its process;  cpuSeconds until all is done;  idleCpu share of a core afterwards

Refuses to hold: managers and trainers: no pod has a process behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from kubernetes.aio.client.api_client import ApiClient

from polyrl_operator.cluster.client import ApiError, Client
from polyrl_operator.cluster.connect import load_configuration, watch_session
from polyrl_operator.cluster.fake_nodes import FakeNodes
from polyrl_operator.cluster.kinds import JOB

ROOT: Final = Path(__file__).parents[2]
NAMESPACE: Final = "operator-benchmark"
ROLLOUTS: Final = 3
"""Per job; with its manager and its trainer five pods."""
ASSETS: Final = os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin")
START_S: Final = 60.0
LOOK_S: Final = 1.0
IDLE_S: Final = 30.0
"""Over which the rest is measured, after a pause of a third of it."""
SIDE_BY_SIDE: Final = 16


def job(name: str, rollouts: int, most: int) -> dict[str, Any]:
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
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"recipe": recipe, "rollout": rollout, "scaling": {"mode": "Manual"}},
    }


class Bench:
    """One run."""

    def __init__(self, client: Client, kubeconfig: Path) -> None:
        self.client, self.kubeconfig = client, kubeconfig
        self.rss = 0
        self._slots = asyncio.Semaphore(SIDE_BY_SIDE)

    async def prepare(self) -> None:
        """CRD and namespace."""
        kubectl = shutil.which("kubectl", path=f"{ASSETS}:{os.environ['PATH']}") or "kubectl"
        for words in (f"apply --server-side -f {ROOT}/crds/polyrljobs.yaml", f"create namespace {NAMESPACE}"):
            command = [kubectl, f"--kubeconfig={self.kubeconfig}", *words.split()]
            process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
            if await process.wait():
                raise SystemExit(f"kubectl {words} failed")
        async with asyncio.timeout(START_S):
            while True:
                with suppress(ApiError):
                    await self.jobs()
                    return
                await asyncio.sleep(LOOK_S)

    async def submit(self, wanted: list[dict[str, Any]]) -> None:
        async def one(item: dict[str, Any]) -> None:
            async with self._slots:
                await self.client.create(item)

        await asyncio.gather(*(one(item) for item in wanted))

    async def jobs(self) -> list[dict[str, Any]]:
        return [item async for items, _ in self.client.pages(JOB, NAMESPACE) for item in items]

    async def until_ready(self, rollouts: int, count: int, deadline_s: float, name: str = "") -> float:
        """Seconds until the statuses of `count` jobs show so many ready rollouts, and none beyond."""
        began = time.monotonic()
        while True:
            shown = [item.get("status", {}).get("rollout", {}) for item in await self.jobs()
                     if not name or item["metadata"]["name"] == name]  # fmt: skip
            done = sum(one.get("readyReplicas") == rollouts == one.get("replicas") for one in shown)
            if done >= count:
                return time.monotonic() - began
            if time.monotonic() - began > deadline_s:
                raise SystemExit(f"only {done} of {count} jobs were ready within {deadline_s:.0f} s")
            print(f"{done} of {count} jobs ready at {time.monotonic() - began:.0f} s", file=sys.stderr)
            await asyncio.sleep(LOOK_S)

    async def watch_memory(self, process: psutil.Process) -> None:
        while True:
            with suppress(psutil.Error):
                self.rss = max(self.rss, process.memory_info().rss)
            await asyncio.sleep(0.2)


@asynccontextmanager
async def operator(kubeconfig: Path) -> AsyncIterator[tuple[psutil.Process, str]]:
    """The operator as it is deployed, and the URL of its metrics."""
    command = [sys.executable, "-m", "polyrl_operator.cluster", f"--namespace={NAMESPACE}", "--host=127.0.0.1"]
    command += [f"--lease-namespace={NAMESPACE}", "--metrics-port=0", "--health-port=0", "--log-level=info"]
    command += ["--manager-image=m", "--trainer-image=t", "--rollout-image=r"]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "POD_NAME": "benchmark"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def read(stream: asyncio.StreamReader) -> None:
        async for line in stream:
            said = json.loads(line)
            if said["event"] == "listens" and "/metrics" in said["paths"]:
                listens.set_result(said["port"])
            elif said.get("level") in ("warning", "error"):
                print(line.decode().strip()[:300], file=sys.stderr)

    reading = asyncio.create_task(read(process.stderr))
    try:
        port = await asyncio.wait_for(listens, START_S)
        yield psutil.Process(process.pid), f"http://127.0.0.1:{port}/metrics"
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), START_S)
        await reading


async def requests(url: str) -> Counter[str]:
    """Requests to the API server so far, by verb and resource."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
    pattern = r'polyrl_api_requests_total\{code="[^"]+",resource="([^"]+)",verb="(\w+)"\} ([\d.]+)'
    found: Counter[str] = Counter()
    for resource, verb, count in re.findall(pattern, text):
        found[f"{verb} {resource}"] += int(float(count))
    return found


async def measure(bench: Bench, jobs: int, one: int, deadline_s: float) -> dict[str, Any]:
    await bench.prepare()
    await bench.submit([job(f"job-{number}", ROLLOUTS, ROLLOUTS) for number in range(jobs)])
    async with operator(bench.kubeconfig) as (process, url):
        watching = asyncio.create_task(bench.watch_memory(process))
        seconds = await bench.until_ready(ROLLOUTS, jobs, deadline_s)
        cpu, asked = sum(process.cpu_times()[:2]), await requests(url)
        await asyncio.sleep(IDLE_S / 3)
        before = sum(process.cpu_times()[:2])
        await asyncio.sleep(IDLE_S)
        idle = (sum(process.cpu_times()[:2]) - before) / IDLE_S
        many = await grow_and_shrink(bench, one, deadline_s) if one else {}
        watching.cancel()
    return {
        "jobs": jobs,
        "seconds": round(seconds, 1),
        "cpuSeconds": round(cpu, 1),
        "cpuMillisPerJob": round(1000 * cpu / jobs, 1),
        "rssMiB": round(bench.rss / 2**20),
        "idleCpu": round(idle, 3),
        "requestsPerJob": {what: round(count / jobs, 2) for what, count in asked.most_common() if count >= jobs / 20},
        **many,
    }


async def grow_and_shrink(bench: Bench, rollouts: int, deadline_s: float) -> dict[str, Any]:
    """One job from no rollout to many and back."""
    name = "many"
    await bench.submit([job(name, 0, rollouts)])
    await bench.until_ready(0, 1, deadline_s, name)
    took = {}
    for what, wanted in (("growSeconds", rollouts), ("shrinkSeconds", 0)):
        await bench.client.patch(JOB, NAMESPACE, name, {"spec": {"rollout": {"replicas": wanted}}})
        took[what] = round(await bench.until_ready(wanted, 1, deadline_s, name), 1)
    return {"rollouts": rollouts, **took}


async def main(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        kubeconfig = args.kubeconfig or bare_server(stack)
        configuration = await load_configuration(kubeconfig)
        api = await stack.enter_async_context(ApiClient(configuration))
        client = Client(api, field_manager="benchmark")
        if args.kubeconfig is None:
            session = await stack.enter_async_context(watch_session(configuration, []))
            playing = asyncio.create_task(FakeNodes(client, session, configuration.host).play())
            stack.push_async_callback(ended, playing)
        print(json.dumps(await measure(Bench(client, kubeconfig), args.jobs, args.one, args.deadline), indent=1))


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def bare_server(stack: AsyncExitStack) -> Path:
    """The tests' own; its kubeconfig."""
    sys.path.insert(0, str(ROOT / "tests/integration"))
    from conftest import BareApiServer

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    server = BareApiServer(Path(ASSETS), folder)
    stack.callback(server.stop)
    server.start()
    found: Path = server.kubeconfig()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="of five pods each (default 1000)")
    parser.add_argument("--one", type=int, default=500, help="rollouts of the large job (default 500; 0: none)")
    parser.add_argument("--deadline", type=float, default=600, metavar="S", help="of each phase (default 600)")
    parser.add_argument("--kubeconfig", type=Path, help="a cluster whose own nodes, or kwok's, run the pods")
    # Whoever ends it, what it started ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asyncio.run(main(parser.parse_args()))
