"""Faults at every point of a pull: `python benchmarks/weights/faults.py --combinations 1000 --seed 0`.

A publisher and a receiver in processes of their own, between them a relay. Each combination publishes a version,
announces it, and lets one fault befall at one point: while the receiver dials, in a manifest, at a byte of the chunks
that is drawn; or when all is here, before the version gets its name, before the engine loads it, before it is reported.
The receiver is killed or frozen, the publisher is killed or frozen, the link is slowed to 1 KB/s, changed, held back in
one direction, cut, memory is full, the version is superseded, a second manager announces another one under its
number, or the engine takes other bytes than it is given. While it lasts the trainer takes its next snapshot. Then it is
over, the version is announced as managers do, and the receiver must come to serve it: with a hash over what its engine
read that is the trainer's own. Whoever ended is started again. Prints point by fault: how often, whether the receiver
served on, had said that it failed, or was started again, how long the trainer's snapshot took beyond the longest of
those without a fault, and seconds from the end of the fault until the version is served; the last line is one JSON
object. Ends with 1 when a load was torn, a version was served that nobody published, or a receiver hung.

Hours may be cut into parts: `--to FILE` has a line of JSON for each combination as it ends, and `--from FILE` goes on
behind those that stand there, with the same draws and, when it is the same file, the sums of all. `--only N` does the
N-th combination of the seed alone, on a plane that begins anew.

Root has memory filled for real, in a file system of its own; others leave that fault out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fault.process import Process
from fault.relay import LINK_FAULTS, Relay

from polyrl.keys import FILE_NAMES, AgentKeys, TrainerKeys
from polyrl.weights.engine_sums import EngineSum, WeightSums
from polyrl_operator.secret import write_run_keys

ON_THE_WAY: Final = ("connect", "manifest", "chunks")
HERE_ALREADY: Final = ("verify", "stage", "load", "report")
OTHER_FAULTS: Final = (
    "receiver killed", "receiver frozen", "publisher killed", "publisher frozen", "memory full", "superseded",
    "second manager",
)  # fmt: skip
OTHER_BYTES: Final = "other bytes"
"""Only as the engine loads: a manager that compares sums must see it."""
MANIFEST_BYTES: Final = 600
"""Below which handshakes and the manifest come."""
ANCHOR_BYTES: Final = 12_000_000
DELTA_BYTES: Final = 300_000
"""A little less than comes of a delta, and than it takes to reach its last chunk."""
LONGEST_S: Final = 2.5
"""Of a fault; a receiver notices silence after 1 s."""
ANNOUNCED_S: Final = 0.5
"""Between two announcements: managers repeat those that were answered by a failure."""
REACH_S: Final = 10.0
"""To the point; a pull that is over before has not reached it, and does not count."""
RECOVER_S: Final = 60.0
STARTS_S: Final = 120.0
MEMORY_BYTES: Final = 64 << 20
"""Two versions and a spare one, and room."""
UNDISTURBED: Final = 20
"""Snapshots."""


@dataclass(frozen=True)
class Draw:
    """One combination of a seed, whatever came before it."""

    number: int
    point: str
    fault: str
    dice: random.Random


def draws(seed: int, memory: bool) -> Iterator[Draw]:
    """Without an end. Each once before any twice, in an order that is drawn."""
    drawn = combinations(memory)
    for number in itertools.count():
        if number % len(drawn) == 0:
            random.Random(f"{seed} order {number}").shuffle(drawn)
        point, fault = drawn[number % len(drawn)]
        yield Draw(number, point, fault=fault, dice=random.Random(f"{seed} {number}"))


@dataclass
class Found:
    """Of all combinations."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    snapshots: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    """Of each combination: the receiver serves on, said that it failed and serves after all, or was started again."""
    undisturbed: list[float] = field(default_factory=list)
    not_reached: int = 0
    served: int = 0
    torn: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    done: int = 0
    """Combinations behind which it goes on."""

    @property
    def combinations(self) -> int:
        return sum(map(len, self.seconds.values()))

    @property
    def is_bad(self) -> bool:
        return bool(self.torn or self.unverified or self.stuck)

    def add(self, record: dict[str, Any]) -> None:
        """A combination, as `--to` writes it."""
        key, self.done = (record["point"], record["fault"]), record["number"] + 1
        self.snapshots[key] += record["snapshots"]
        self.torn += record["torn"]
        self.unverified += record["unverified"]
        self.stuck += record["stuck"]
        self.served += record["served"]
        self.not_reached += not record["end"]
        if record["end"]:
            self.seconds[key].append(record["seconds"])
            self.ends[key].append(record["end"])


def records_of(file: Path, seed: int, memory: bool) -> list[dict[str, Any]]:
    """Of the file's lines, which must be this seed's draws. A last line that was cut by a kill is left out."""
    lines = file.read_text().splitlines() if file.exists() else []
    try:
        records = [json.loads(line) for line in lines if line.endswith("}")]
    except ValueError as error:
        raise SystemExit(f"--from {file}: not lines of JSON as --to writes them ({error})") from None
    for record, draw in zip(records, draws(seed, memory), strict=False):
        if (record["number"], record["point"], record["fault"]) != (draw.number, draw.point, draw.fault):
            raise SystemExit(
                f"--from {file}: combination {draw.number} is not that of --seed {seed}; take its own seed"
            )
    return records


class Plane:
    """Publisher, link and receiver, and what was published."""

    def __init__(self, folder: Path, memory: Path, found: Found) -> None:
        self.folder, self.memory, self.found = folder, memory, found
        write_run_keys(folder / "keys")
        keys, agent = (folder / "keys" / FILE_NAMES[kind] for kind in (TrainerKeys, AgentKeys))
        self.publisher = Process("fault/publisher.py", str(keys), "tcp://127.0.0.1:*")
        self.receiver = Process("fault/receiver.py", str(agent), str(memory))
        self.relay, self.sums = Relay(), WeightSums()
        self.version = -1
        self.contents: dict[int, str] = {}
        self.refs: dict[int, dict[str, Any]] = {}
        self.served = -1
        self.point: str | None = None
        self.changed = asyncio.Event()
        self.starts = self.failures = 0
        """Of receivers, and what they answered."""
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.endpoint = await self.relay.start()
        await self.publisher.start()
        await self.start_receiver()

    async def start_receiver(self) -> None:
        if self._listening is not None:
            await self._listening
        await self.receiver.start()
        self.served, self.starts = -1, self.starts + 1
        async with asyncio.timeout(STARTS_S):
            await self.receiver.read_line()
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (event := await self.receiver.read_line()) is not None:
            if event["event"] == "serves":
                self.served, self.found.served = event["version"], self.found.served + 1
                if self.served not in self.contents:
                    self.found.unverified.append(f"version {self.served} was served, and nobody published it")
                elif self._is_refused(self.served, event["content"]):
                    self.served = -1
                    self.receiver.send(signal.SIGKILL)
                elif event["content"] != self.contents[self.served]:
                    self.found.torn.append(f"version {self.served} was served with other bytes")
            self.failures += event["event"] == "failed"
            self.point = event.get("point", self.point)
            self.changed.set()
        await self.receiver.process.wait()
        self.changed.set()

    def _is_refused(self, version: int, content: str) -> bool:
        """As managers do, to whom two others have said what they hold."""
        for engine in ("one", "another"):
            self._judge(engine, version, self.contents[version])
        return self._judge(f"receiver {self.starts}", version, content)

    def _judge(self, engine: str, version: int, content: str) -> bool:
        given = EngineSum("reads", bytes.fromhex(content), exact=True)
        of = self.contents[version].encode()
        return engine in self.sums.judge(engine, version, of, given=given, receipt=of).refused

    async def publish(self, version: int) -> float:
        """Seconds that the trainer waited."""
        async with asyncio.timeout(STARTS_S):
            await self.publisher.send_line(str(version))
            answer = await self.publisher.read_line()
        assert answer is not None, "the publisher has ended"
        if self.contents.setdefault(version, answer["content"]) != answer["content"]:
            raise RuntimeError(f"version {version} was published again with other bytes")
        self.version, self.relay.port = version, answer["port"]
        names = ("public_key", "manifest_hash", "receipt")
        self.refs[version] = {name: answer[name] for name in names} | {"version": version, "endpoint": self.endpoint}
        return float(answer["snapshot_seconds"])

    async def announce(self, version: int, **other: str) -> None:
        await self.receiver.send_line(json.dumps({**self.refs[version], **other}))

    async def until_served(self, version: int) -> bool:
        """Announced again and again, and a receiver that gave up is started again; False when it took too long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RECOVER_S
        while self.served < version and loop.time() < deadline:
            if not self.receiver.is_alive:
                await self.start_receiver()
            self.changed.clear()
            await self.announce(version)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), ANNOUNCED_S)
        return self.served >= version

    async def end(self) -> None:
        await self.publisher.end()
        await self.receiver.end()


class Combination:
    """One fault at one point."""

    def __init__(self, plane: Plane, draw: Draw) -> None:
        self.plane, self.dice, self.point, self.fault = plane, draw.dice, draw.point, draw.fault
        self.lasts_s = self.dice.uniform(0.2, LONGEST_S)

    async def run(self) -> None:
        plane, version = self.plane, self.plane.version
        starts, failures = plane.starts, plane.failures
        await self._arm()
        await plane.announce(version, **({} if self.point in ON_THE_WAY else {"point": self.point}))
        reached = await self._is_reached()
        if reached:
            await self._apply(version)
        plane.relay.heal()
        await plane.receiver.send_line('{"go": true}')
        if plane.version == version:
            await plane.publish(version + 1)
        begun = asyncio.get_running_loop().time()
        key, served = (self.point, self.fault), await plane.until_served(version)
        if not served:
            plane.found.stuck.append(f"version {version} is not served")
        if reached:
            plane.found.seconds[key].append(asyncio.get_running_loop().time() - begun)
            failed = "failed" if plane.failures > failures else "serves"
            plane.found.ends[key].append("started" if plane.starts > starts else failed)
        else:
            plane.found.not_reached += 1

    async def _arm(self) -> None:
        at = {
            "connect": 0,
            "manifest": self.dice.randint(1, MANIFEST_BYTES),
            "chunks": self.dice.randint(MANIFEST_BYTES, self._bytes()),
        }.get(self.point, 1 << 60)
        if self.fault == "changed":
            at = max(at, 1)
        self.plane.point = None
        self.plane.relay.arm(self.fault if self.fault in LINK_FAULTS else "", at)

    def _bytes(self) -> int:
        """Of what is about to come."""
        return ANCHOR_BYTES if self.plane.served < 0 else DELTA_BYTES

    async def _is_reached(self) -> bool:
        """Whether the pull came to the point."""
        plane, deadline = self.plane, asyncio.get_running_loop().time() + REACH_S
        reached = asyncio.create_task(plane.relay.reached.wait())
        try:
            while asyncio.get_running_loop().time() < deadline:
                if reached.done() or plane.point == self.point:
                    return True
                if plane.served >= plane.version or not plane.receiver.is_alive:
                    return False
                plane.changed.clear()
                changed = asyncio.create_task(plane.changed.wait())
                await asyncio.wait({reached, changed}, timeout=ANNOUNCED_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return False
        finally:
            reached.cancel()

    async def _apply(self, version: int) -> None:
        plane, key = self.plane, (self.point, self.fault)
        match self.fault:
            case "receiver killed":
                await plane.receiver.end()
            case "receiver frozen":
                plane.receiver.send(signal.SIGSTOP)
            case "publisher killed":
                await plane.publisher.end()
            case "publisher frozen":
                plane.publisher.send(signal.SIGSTOP)
            case "memory full":
                _fill(plane.memory)
            case fault if fault == OTHER_BYTES:
                await plane.receiver.send_line('{"alter": true}')
            case "second manager":
                other = plane.refs.get(version - 1, plane.refs[version])
                await plane.announce(version, manifest_hash=other["manifest_hash"])
        if not self.fault.startswith("publisher"):
            plane.found.snapshots[key].append(await plane.publish(version + 1))
        if self.fault == "superseded":
            await plane.announce(version + 1)
        await asyncio.sleep(self.lasts_s)
        await self._over(version)

    async def _over(self, version: int) -> None:
        plane = self.plane
        if self.fault == "publisher killed":
            await plane.publisher.start()
            await plane.publish(version)
        plane.publisher.send(signal.SIGCONT)
        plane.receiver.send(signal.SIGCONT)
        (plane.memory / FILLER).unlink(missing_ok=True)


FILLER: Final = "filler"


def _fill(memory: Path) -> None:
    with contextlib.suppress(OSError), (memory / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


@contextlib.contextmanager
def small_memory(folder: Path) -> Iterator[bool]:
    """A file system of MEMORY_BYTES at `folder`; whether there is one."""
    options = ["-t", "tmpfs", "-o", f"size={MEMORY_BYTES}", "polyrl-faults", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(["mount", *options], check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def combinations(memory: bool) -> list[tuple[str, str]]:
    """Points and faults that may meet: a link can do nothing to what is here already."""
    others = [fault for fault in OTHER_FAULTS if memory or fault != "memory full"]
    return [
        *((point, fault) for point in ON_THE_WAY for fault in (*LINK_FAULTS, *others)),
        *((point, fault) for point in HERE_ALREADY for fault in others),
        ("load", OTHER_BYTES),
    ]


async def one_combination(plane: Plane, draw: Draw) -> dict[str, Any]:
    """What `Found.add` takes."""
    found = plane.found = Found()
    try:
        await Combination(plane, draw).run()
    except TimeoutError:
        # What was found until here is worth its hours.
        found.stuck.append(f"no answer of a process within {STARTS_S:g} s")
    key = (draw.point, draw.fault)
    return {
        "number": draw.number,
        "point": draw.point,
        "fault": draw.fault,
        "seconds": next(iter(found.seconds[key]), None),
        "end": next(iter(found.ends[key]), ""),
        "snapshots": found.snapshots[key],
        "served": found.served,
        **{
            name: [f"combination {draw.number}, {draw.point}, {draw.fault}: {one}" for one in sentences]
            for name, sentences in (("torn", found.torn), ("unverified", found.unverified), ("stuck", found.stuck))
        },
    }


async def measure(asked: argparse.Namespace, folder: Path) -> Found:
    found, memory = Found(), folder / "memory"
    memory.mkdir()
    with small_memory(memory) as is_small:
        for record in records_of(asked.begun, asked.seed, is_small) if asked.begun else ():
            found.add(record)
        first, most = found.done, asked.combinations
        if asked.only is not None:
            first, most = asked.only, found.combinations + 1
        plane = Plane(folder, memory, Found())
        await plane.start()
        try:
            for version in range(UNDISTURBED):
                found.undisturbed.append(await plane.publish(version))
                await plane.until_served(version)
            await plane.publish(UNDISTURBED)
            for draw in itertools.islice(draws(asked.seed, is_small), first, None):
                if found.combinations >= most:
                    break
                record = await one_combination(plane, draw)
                found.add(record)
                if asked.to:
                    with asked.to.open("a") as lines:
                        print(json.dumps(record), file=lines, flush=True)
                if asked.only is not None or record["torn"] or record["unverified"] or record["stuck"]:
                    break
        finally:
            await plane.end()
    return found


def table(found: Found) -> None:
    longest = max(found.undisturbed)
    ends = f"{'serves':>7} {'failed':>7} {'started':>7}"
    print(f"{'point':9} {'fault':17} {'runs':>5} {ends} {'waits':>7} {'served after: median, longest':>30}")
    for key in sorted(found.seconds):
        times = found.seconds[key]
        waits = max([max(0.0, one - longest) for one in found.snapshots[key]], default=None)
        shown = "-" if waits is None else f"{waits:.3f}"
        counts = " ".join(f"{found.ends[key].count(end):7}" for end in ("serves", "failed", "started"))
        after = f"{statistics.median(times):22.2f} {max(times):7.2f}"
        print(f"{key[0]:9} {key[1]:17} {len(times):5} {counts} {shown:>7} {after}")


def summary(found: Found) -> dict[str, Any]:
    during = [one for times in found.snapshots.values() for one in times]
    after = [one for times in found.seconds.values() for one in times]
    return {
        "combinations": len(after),
        "notReached": found.not_reached,
        "served": found.served,
        "torn": len(found.torn),
        "unverified": len(found.unverified),
        "stuck": len(found.stuck),
        "snapshotSeconds": {
            "undisturbedMedian": round(statistics.median(found.undisturbed), 4),
            "undisturbedLongest": round(max(found.undisturbed), 4),
            "duringFaultsMedian": round(statistics.median(during), 4) if during else None,
            "duringFaultsLongest": round(max(during), 4) if during else None,
        },
        "servedAfterSeconds": {
            "median": round(statistics.median(after), 2) if after else None,
            "longest": round(max(after), 2) if after else None,
        },
    }


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--combinations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="begun", type=Path, help="lines of an earlier --to, behind which this goes on")
    parser.add_argument("--to", type=Path, help="gets a line for each combination")
    parser.add_argument("--only", type=int, help="the combination of that number alone")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = asyncio.run(measure(asked, Path(folder)))
    table(found)
    for sentence in [*found.torn, *found.unverified, *found.stuck]:
        print(sentence)
    print(json.dumps(summary(found)))
    return 1 if found.is_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
