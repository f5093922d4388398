"""What the manager costs: `python benchmarks/manager/run.py --row 8x16x4000 --repeats 5` prints one JSON line per row.

The manager is its real process, journal and CURVE on. CPU seconds are user + system of all its threads, from submit to
the last acknowledgement (or to the load's limit); each repeat has a fresh manager, and of the repeats the least and the
median are printed. The rows are in `loads`; without --row all run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq.asyncio
from drive import Drive, connected
from loads import ROWS, Load
from stand import Stand, standing

from polyrl.weights import WeightsRef

RSS_POLL_S: Final = 0.1
TENTHS: Final = 10
WARMUP_S: Final = 5.0
"""Of a paced load: latencies of the first seconds, in which everything is placed, are left out."""


@dataclass
class Watch:
    """Reads the manager's memory from outside while a load is on."""

    stand: Stand
    drive: Drive
    seen: list[tuple[int, int]] = field(default_factory=list)
    """(tokens so far, RSS in bytes)"""

    async def sample(self) -> None:
        while True:
            self.seen.append((self.drive.tokens, self.stand.rss()))
            await asyncio.sleep(RSS_POLL_S)

    @property
    def peak(self) -> int:
        return max(rss for _, rss in self.seen)

    def by_tenth(self) -> list[float]:
        """Largest RSS in MB in each tenth of the tokens."""
        total = self.seen[-1][0] + 1
        tenths: list[list[int]] = [[] for _ in range(TENTHS)]
        for tokens, rss in self.seen:
            tenths[tokens * TENTHS // total].append(rss)
        return [round(max(tenth) / 1e6, 1) for tenth in tenths if tenth]


async def run_load(load: Load, core: int | None) -> dict[str, float]:
    """One load against a fresh manager."""
    with tempfile.TemporaryDirectory() as name:
        async with standing(Path(name), core) as stand:
            context = zmq.asyncio.Context()
            async with connected(stand) as client:
                await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b""))
                drive = Drive(load, stand, client, context)
                figures = await _measure(load, drive, stand)
                await drive.end()
            context.term()
    return figures


async def _measure(load: Load, drive: Drive, stand: Stand) -> dict[str, Any]:
    cpu, written, rss, began = stand.cpu_s(), stand.written(), stand.rss(), time.monotonic()
    watch = Watch(stand, drive)
    watching = asyncio.create_task(watch.sample())
    placed = await drive.submit()
    await _until_over(load, drive)
    watching.cancel()
    tokens, seconds = drive.tokens, time.monotonic() - began
    millions = tokens / 1e6
    return {
        "cpuSecondsPerMillionTokens": (stand.cpu_s() - cpu) / millions,
        "coreShare": (stand.cpu_s() - cpu) / seconds,
        "bytesPerToken": sum(agent.bytes_sent for agent in drive.agents) / tokens,
        **_latencies(load, drive),
        "placeSeconds": placed,
        "peakRssMb": watch.peak / 1e6,
        "rssPerSampleKb": (watch.peak - rss) / load.samples / 1e3,
        "journalMbWrittenPerMillionTokens": (stand.written() - written) / millions / 1e6,
        "journalMb": stand.journal_bytes() / 1e6,
        "tokens": tokens,
        "samplesAcknowledged": drive.acknowledged,
        "seconds": seconds,
        "rssMbByTenth": watch.by_tenth(),
    }


async def _until_over(load: Load, drive: Drive) -> None:
    taking = asyncio.create_task(drive.take())
    deadline = time.monotonic() + load.limit_s
    while not taking.done() and time.monotonic() < deadline and drive.tokens < load.limit_tokens:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(taking), RSS_POLL_S)
        drive.stand.check()
    if not taking.done():
        taking.cancel()


def _latencies(load: Load, drive: Drive) -> dict[str, float]:
    """p50 and p99 over all Deltas."""
    skipped = int(WARMUP_S * load.pace / load.chunk) if load.endless and load.pace < 1e9 else 0
    seconds = [one for agent in drive.agents for one in agent.accept_s[skipped:]]
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100)
    return {"acceptMsP50": cuts[49] * 1e3, "acceptMsP99": cuts[98] * 1e3, "acceptMsMax": max(seconds) * 1e3}


def _summary(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Least and median of each figure."""
    figures: dict[str, Any] = {"rssMbByTenth": repeats[-1].pop("rssMbByTenth")}
    for name in repeats[-1]:
        values = [one[name] for one in repeats]
        figures[name] = [round(min(values), 3), round(statistics.median(values), 3)]
    return figures


def main() -> None:
    """Runs the rows one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=ROWS, action="append", help="default: all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--core", type=int, help="the one core that the manager gets")
    arguments = parser.parse_args()
    for row in arguments.row or ROWS:
        repeats = [asyncio.run(run_load(ROWS[row], arguments.core)) for _ in range(arguments.repeats)]
        print(json.dumps({"row": row, "repeats": len(repeats), **_summary(repeats)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
