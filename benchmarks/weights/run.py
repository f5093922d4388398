"""What the wire carries, beside the fastest that this machine's loopback carries, measured in turns within one run.

    python benchmarks/weights/run.py --gigabytes 2

A publisher in a process of its own, a puller in this one, streams and chunks as in a run. Beside them equal numbers of
plain sockets, which send the same bytes from one mapped buffer into another: sealed by AES-GCM in frames of the size
that is fastest here (`ratio`: pull / that), and as they are (`ratioPlain`: pull without encryption / the faster of that
and iperf3, where it is installed). Beside other loads, who has more threads gets more: `ratioOfCpu` compares the CPU
seconds of both sides per byte instead. For scale, a copy by numpy within one process, and the Mooncake transfer engine
over TCP, without keys or encryption, where POLYRL_MOONCAKE_PYTHON names an interpreter that has it.

The puller verifies all that it receives; the sockets verify nothing. Every version is new to the last byte; the first
one, which touches fresh memory, counts apart. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from floor import FRAMES, Flow, socket_flow
from plain import PlainHandshake

from polyrl.keys import FILE_NAMES, AgentKeys, TrainerKeys, read_keys
from polyrl.weights import WeightsRef
from polyrl.wire.sealing import Handshake
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staged, Staging
from polyrl_rollout.weights.transfer import STREAMS

DEADLINE_S: Final = 600.0
PULL_DEADLINE_S: Final = 120.0
IPERF_SECONDS: Final = 2
MOONCAKE: Final = "POLYRL_MOONCAKE_PYTHON"
COPY: Final = "processes/mooncake_copy.py"


class PublisherProcess:
    """Publishes random tensors, one version per line of its input."""

    def __init__(
        self,
        keys: Path,
        gigabytes: float,
        *,
        encrypted: bool = True,
        bind: str = "",
        within: tuple[str, ...] = (),
        pods: tuple[int, int] | None = None,
    ) -> None:
        """`within` is a command that runs another one. `pods`: so many further machines, which find it at that port."""
        program = Path(__file__).parent / "publisher_process.py"
        argv = [*within, sys.executable, str(program), str(keys), str(gigabytes), *([bind] if bind else [])]
        argv += [] if encrypted else ["--plain"]
        argv += [] if pods is None else [f"pods={pods[0]}:{pods[1]}"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the publisher's process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def publish(self, version: int) -> tuple[WeightsRef, dict[str, Any]]:
        """And what it cost."""
        published = self.ask(f"publish {version}")
        fields = {name: bytes.fromhex(published[name]) for name in ("manifest_hash", "receipt")}
        where = {"public_key": published["public_key"], "others": tuple(published["others"])}
        return WeightsRef(version, published["endpoint"], **where, **fields), published

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


class Pulls:
    """One puller and its publisher."""

    def __init__(self, folder: Path, gigabytes: float, *, encrypted: bool) -> None:
        keys = folder / f"keys-{encrypted}"
        write_run_keys(keys)
        file, agent = keys / FILE_NAMES[TrainerKeys], read_keys(AgentKeys, keys / FILE_NAMES[AgentKeys])
        self._publisher = PublisherProcess(file, gigabytes, encrypted=encrypted)
        self._staging = Staging("benchmark", f"weights-{encrypted}")
        self._puller = Puller(agent, self._staging, handshake=Handshake if encrypted else PlainHandshake)
        self._served: Staged | None = None
        self._version = -1

    async def turn(self) -> dict[str, float]:
        self._version += 1
        ref, published = self._publisher.publish(self._version)
        before, cpu, begun = self._publisher.ask("cpu")["cpu"], time.process_time(), time.monotonic()
        async with asyncio.timeout(PULL_DEADLINE_S):
            pulled = await self._puller.pull(ref, None)
        seconds, spent = time.monotonic() - begun, time.process_time() - cpu
        if pulled.staged.receipt != ref.receipt:
            raise RuntimeError("what was pulled is not what was published")
        self._served = pulled.staged
        self._staging.keep_only(self._version)
        size = pulled.bytes_pulled
        return {
            "pull": size / seconds,
            "publish": size / published["seconds"],
            "receiver": spent / size * 1e9,
            "sender": (self._publisher.ask("cpu")["cpu"] - before) / size * 1e9,
            "publisher": published["cpu"] / size * 1e9,
        }

    def close(self) -> None:
        self._publisher.close()
        self._staging.close()


def iperf3(streams: int) -> float:
    """Bytes per second; 0 where it is not installed."""
    program = shutil.which("iperf3")
    if program is None:
        return 0.0
    server = subprocess.Popen([program, "-s", "-1", "-B", "127.0.0.1", "-p", "5299"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(20):
            time.sleep(0.1)
            argv = [program, "-c", "127.0.0.1", "-p", "5299", "-P", str(streams), "-t", str(IPERF_SECONDS), "-J"]
            ended = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
            if ended.returncode == 0:
                return float(json.loads(ended.stdout)["end"]["sum_received"]["bits_per_second"]) / 8
        return 0.0
    finally:
        server.kill()
        server.wait(10)


def numpy_copy(size: int) -> float:
    """Bytes per second from warm memory into warm memory, one thread."""
    source, target = (np.ones(size, np.uint8) for _ in range(2))
    begun = time.monotonic()
    np.copyto(target, source)
    return size / (time.monotonic() - begun)


def mooncake(size: int) -> float:
    """Bytes per second; 0 where it is not installed. It may be reached by nobody: it knows no keys."""
    python = os.environ.get(MOONCAKE)
    if python is None:
        return 0.0
    confine, program = Path(__file__).parents[2] / "tests/sglang/confine.sh", Path(__file__).parent / COPY
    argv = [confine, python, program, str(size)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PULL_DEADLINE_S, check=True)
    return float(next(line for line in done.stdout.splitlines() if line.startswith("speed ")).split()[1])


async def measure(gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    rows: dict[str, list[Any]] = {name: [] for name in ("sealed", "plain", "sealedFlow", "plainFlow", "iperf3")}
    size = int(gigabytes * 1e9)
    first, frame = {}, max(FRAMES, key=lambda frame: flow(size // 4, frame).speed)
    # One after the other: each holds five times a version in memory.
    for name in ("sealed", "plain"):
        pulls = Pulls(folder, gigabytes, encrypted=name == "sealed")
        try:
            first[name] = await pulls.turn()
            await pulls.turn()  # both files of the puller have been touched then
            for _ in range(rounds):
                rows[name].append(await pulls.turn())
                is_sealed = name == "sealed"
                rows[f"{name}Flow"].append(await asyncio.to_thread(flow, size, frame if is_sealed else None))
                if not is_sealed:
                    rows["iperf3"].append(await asyncio.to_thread(iperf3, STREAMS))
        finally:
            pulls.close()
    beside = {
        "numpyCopyBytesPerSecond": round(numpy_copy(size)),
        "mooncakeBytesPerSecond": round(mooncake(size)) or None,
    }
    return {**summary(first["sealed"], rows, frame), **beside}


def flow(size: int, frame: int | None) -> Flow:
    return socket_flow(size, STREAMS, frame)


def ratio_of_cpu(floor: list[Flow], pulls: list[dict[str, float]]) -> float:
    """CPU seconds per byte of both sides: the floor's / the pull's."""
    least = statistics.median(flow.cpu_per_gigabyte for flow in floor)
    return round(least / statistics.median(row["sender"] + row["receiver"] for row in pulls), 3)


def summary(first: dict[str, float], rows: dict[str, list[Any]], frame: int) -> dict[str, Any]:
    def middle(name: str, of: Callable[[Any], float] = float) -> float:
        return statistics.median(of(row) for row in rows[name])

    plain_floor = [max(flow.speed, other) for flow, other in zip(rows["plainFlow"], rows["iperf3"], strict=True)]
    ratios = [row["pull"] / best.speed for row, best in zip(rows["sealed"], rows["sealedFlow"], strict=True)]
    plain_ratios = [row["pull"] / best for row, best in zip(rows["plain"], plain_floor, strict=True)]
    return {
        "pullBytesPerSecond": round(middle("sealed", lambda row: row["pull"])),
        "firstPullBytesPerSecond": round(first["pull"]),
        "encryptedLoopbackBytesPerSecond": round(middle("sealedFlow", lambda flow: flow.speed)),
        "encryptedLoopbackFrame": frame,
        "plainPullBytesPerSecond": round(middle("plain", lambda row: row["pull"])),
        "plainLoopbackBytesPerSecond": round(middle("plainFlow", lambda flow: flow.speed)),
        "iperf3BytesPerSecond": round(middle("iperf3")) or None,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratioPlain": round(statistics.median(plain_ratios), 3),
        "ratioOfCpu": ratio_of_cpu(rows["sealedFlow"], rows["sealed"]),
        "ratioOfCpuPlain": ratio_of_cpu(rows["plainFlow"], rows["plain"]),
        "ratiosPlain": [round(ratio, 3) for ratio in plain_ratios],
        "publishBytesPerSecond": round(middle("sealed", lambda row: row["publish"])),
        "cpuSecondsPerGigabyte": {
            side: round(middle("sealed", lambda row, side=side: row[side]), 3)
            for side in ("publisher", "sender", "receiver")
        },
        "streams": STREAMS,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of one version")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        async with asyncio.timeout(DEADLINE_S):
            print(json.dumps(await measure(arguments.gigabytes, arguments.rounds, Path(folder))))


if __name__ == "__main__":
    asyncio.run(main())
