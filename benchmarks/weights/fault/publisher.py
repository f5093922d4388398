"""A publisher for `faults`: publishes the version that a line of its input names, and says what it is and what it cost.

Tensors are drawn by the version's number alone, so one that starts again continues where it was killed, as a trainer
does from its checkpoint. What was published is named by a hash of the tensors themselves, which no code of the weight
plane computes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final
from unittest import mock

import structlog
import torch

from polyrl import parent_death_signal
from polyrl_trainer.backends.weight_stream import write_stream
from polyrl_trainer.weights.publisher import WeightPublisher
from polyrl_trainer.weights.server import WeightServer

TENSORS: Final = 6
ELEMENTS: Final = 1_000_000
"""Of a tensor, of two bytes: 12 MB in all, from 8 MB on deltas are made."""
CHANGED: Final = 50_000
"""Elements of a tensor that a version changes."""
CHUNK_BYTES: Final = 64 << 10
SLOW_LINK: Final = 12.5e6
"""Bytes per second, for the planner: behind a fast link it would make no deltas of 12 MB."""


class Weights:
    """Of one version after the other."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.version = -1
        # Once for all versions: who starts again goes through hundreds of them.
        self._order = torch.randperm(ELEMENTS, generator=draw)
        self.tensors = {
            f"t{number}": torch.randint(0, 1 << 14, (ELEMENTS,), generator=draw, dtype=torch.int16)
            for number in range(TENSORS)
        }

    def go_to(self, version: int) -> str:
        """Their hash, by name."""
        while self.version < version:
            self.version += 1
            start = self.version * CHANGED % ELEMENTS
            for tensor in self.tensors.values():
                tensor[self._order[start : start + CHANGED]] += 1
        found = hashlib.sha256()
        for name in sorted(self.tensors):
            found.update(self.tensors[name].numpy().tobytes())
        return found.hexdigest()


def main(keys: Path, bind: str) -> None:
    parent_death_signal.hold()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    publisher, weights = WeightPublisher(keys, bind, keep=2, chunk_bytes=CHUNK_BYTES), Weights()
    with mock.patch.object(WeightServer, "bandwidth", SLOW_LINK):
        for line in sys.stdin:
            version = int(line)
            content = weights.go_to(version)
            begun = time.monotonic()
            snapshot = publisher.snapshot(partial(write_stream, weights.tensors), {"config.json": b"{}"})
            copied = time.monotonic()
            ref = publisher.publish_snapshot(version, snapshot)
            answer = {
                "snapshot_seconds": copied - begun,
                "publish_seconds": time.monotonic() - copied,
                "content": content,
                "port": publisher.server.port,
                "public_key": ref.public_key,
                "manifest_hash": ref.manifest_hash.hex(),
                "receipt": ref.receipt.hex(),
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
