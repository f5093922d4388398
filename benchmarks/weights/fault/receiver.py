"""A receiver for `faults`: the agent's own `Versions`, `Puller` and `Staging`, and an engine that reads what it loads.

Its input is a line per announcement, {"point", "version", ...}; its output a line per event: "at" a point, where it
waits for a line if the announcement names that point, "serves" a version with the hash of what was read from the
staged file (after a line {"alter": true} of something else), "failed", and "gave up". Points: verify (all chunks are
here), stage, load, report.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

import structlog
from safetensors.numpy import load_file

from polyrl import parent_death_signal, wire
from polyrl.keys import AgentKeys, read_keys
from polyrl.weights import WeightsRef
from polyrl.weights.deltas import EachOf
from polyrl_rollout.engines.port import NO_VERSION, EngineFailed, InferenceEngine
from polyrl_rollout.weights.puller import Pulled, Puller
from polyrl_rollout.weights.staging import Partial, Staged, Staging
from polyrl_rollout.weights.versions import Versions

SILENCE_S: Final = 1.0
PROGRESS_S: Final = 4.0
"""A tenth of what agents wait: that many faults are seen in the time."""


def emit(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class Points:
    """Where it may have to wait."""

    def __init__(self) -> None:
        self.wanted = ""
        self.go = threading.Event()

    def reach(self, name: str) -> None:
        """By the thread that works; whoever wanted that lets it go on, or ends the process."""
        if name == self.wanted:
            self.wanted = ""
            self.go.clear()
            emit(event="at", point=name)
            self.go.wait()


def pausing(points: Points) -> Callable[..., None]:
    """`Partial.verify`, once it may."""
    verify = Partial.verify

    def when_it_may(self: Partial, each: EachOf = map) -> None:
        points.reach("verify")
        verify(self, each)

    return when_it_may


class PausingStaging(Staging):
    """Waits before a verified version gets its name."""

    points: Points

    def finish(self, partial: Partial) -> Staged:
        self.points.reach("stage")
        return super().finish(partial)


class ReadingEngine:
    """Its weights are the hash of what it read."""

    def __init__(self, points: Points) -> None:
        self.version, self.points = NO_VERSION, points
        self.alters = False
        """What it reads next is not what it holds."""

    async def switch(self, pulled: Pulled) -> str:
        """As the agent's: why the old version serves on, or nothing."""
        await asyncio.to_thread(self.points.reach, "load")
        content = await asyncio.to_thread(self._read, pulled.staged.folder)
        self.version = pulled.staged.version
        await asyncio.to_thread(self.points.reach, "report")
        receipt, size = pulled.staged.receipt.hex(), pulled.bytes_pulled
        emit(event="serves", version=self.version, content=content, receipt=receipt, bytes=size)
        return ""

    def _read(self, folder: Path) -> str:
        found, tensors = hashlib.sha256(), load_file(folder / "model.safetensors")
        for name in sorted(tensors):
            found.update(tensors[name].tobytes())
        if self.alters:
            self.alters = False
            found.update(b"what nobody gave it")
        return found.hexdigest()


def announced(fields: dict[str, Any]) -> WeightsRef:
    hashes = {name: bytes.fromhex(fields[name]) for name in ("manifest_hash", "receipt")}
    return WeightsRef(fields["version"], fields["endpoint"], public_key=fields["public_key"], **hashes)


def read_input(loop: asyncio.AbstractEventLoop, engine: ReadingEngine, announce: Callable[[WeightsRef], None]) -> None:
    points = engine.points
    for line in sys.stdin:
        fields = json.loads(line)
        if fields.get("alter"):
            engine.alters = True
            continue
        if fields.get("go"):
            points.go.set()
            continue
        points.wanted = fields.get("point", "")
        loop.call_soon_threadsafe(announce, announced(fields))


def note(message: wire.FromAgent) -> None:
    if isinstance(message, wire.WeightsFailed):
        emit(event="failed", version=message.version, reason=message.reason)


async def main(keys: Path, base: Path) -> None:
    points = Points()
    PausingStaging.points = points
    staging, engine = PausingStaging("faults", "receiver", base), ReadingEngine(points)
    gave_up = asyncio.Event()

    def give_up(error: EngineFailed) -> None:
        emit(event="gave up", reason=str(error))
        gave_up.set()

    puller = Puller(read_keys(AgentKeys, keys), staging, silence_s=SILENCE_S, progress_s=PROGRESS_S)
    versions = Versions(cast(InferenceEngine, engine), puller, staging, engine.switch, note, give_up)
    running = asyncio.create_task(versions.run())
    threading.Thread(
        target=read_input, args=(asyncio.get_running_loop(), engine, versions.announce), daemon=True
    ).start()
    emit(event="ready")
    with mock.patch.object(Partial, "verify", pausing(points)):
        await asyncio.wait({running, asyncio.create_task(gave_up.wait())}, return_when=asyncio.FIRST_COMPLETED)
    staging.close()


if __name__ == "__main__":
    parent_death_signal.hold()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
