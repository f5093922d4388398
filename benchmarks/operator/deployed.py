"""The operator's process as it is deployed, and what it says of itself: CPU, memory, requests, turns."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import aiohttp
import psutil

START_S: Final = 60.0
MEMORY_EVERY_S: Final = 0.2


class Deployed:
    """One replica."""

    def __init__(self, pid: int, url: str) -> None:
        self._process, self._url = psutil.Process(pid), url
        self.start_cpu = self.cpu()
        """Seconds that it took to load, before it looked at anything."""
        self.rss = 0

    def cpu(self) -> float:
        """User and system seconds so far."""
        return sum(self._process.cpu_times()[:2])

    async def watch_memory(self) -> None:
        """Until cancelled: keeps the highest."""
        while True:
            with suppress(psutil.Error):
                self.rss = max(self.rss, self._process.memory_info().rss)
            await asyncio.sleep(MEMORY_EVERY_S)

    async def counts(self) -> tuple[Counter[str], int]:
        """Requests to the API server so far, by verb and resource; and turns."""
        text = await self._metrics()
        found: Counter[str] = Counter()
        pattern = r'polyrl_api_requests_total\{code="[^"]+",resource="([^"]+)",verb="(\w+)"\} ([\d.]+)'
        for resource, verb, count in re.findall(pattern, text):
            found[f"{verb} {resource}"] += int(float(count))
        turns = re.findall(r'polyrl_reconciles_total\{outcome="done"\} ([\d.]+)', text)
        return found, sum(int(float(one)) for one in turns)

    async def turns(self) -> Counter[str]:
        """How many turns so far took no longer than so many seconds; `+Inf`: all."""
        found = re.findall(r'polyrl_reconcile_seconds_bucket\{le="([^"]+)"\} ([\d.]+)', await self._metrics())
        return Counter({le: int(float(count)) for le, count in found})

    async def _metrics(self) -> str:
        async with aiohttp.ClientSession() as session, session.get(self._url) as answer:
            return await answer.text()


@asynccontextmanager
async def deployed(kubeconfig: Path, namespace: str) -> AsyncIterator[Deployed]:
    """Runs until the end of the block. Warnings and errors of its log are shown."""
    command = [sys.executable, "-m", "polyrl_operator", f"--namespace={namespace}", "--host=127.0.0.1"]
    command += [f"--lease-namespace={namespace}", "--metrics-port=0", "--health-port=0", "--log-level=info"]
    command += ["--no-metrics-secure", "--manager-image=m", "--trainer-image=t", "--rollout-image=r"]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "POD_NAME": "benchmark"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read(process.stderr, listens))
    try:
        port = await asyncio.wait_for(listens, START_S)
        yield Deployed(process.pid, f"http://127.0.0.1:{port}/metrics")
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), START_S)
        await reading


async def _read(log: asyncio.StreamReader, listens: asyncio.Future[int]) -> None:
    async for line in log:
        entry = json.loads(line)
        if entry["event"] == "listens" and "/metrics" in entry["paths"]:
            listens.set_result(entry["port"])
        elif entry.get("level") in ("warning", "error"):
            print(line.decode().strip()[:300], file=sys.stderr)
