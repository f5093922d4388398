"""A publisher for `run`, `joiners` and `machines`: publishes what it is asked for, by lines, and says what it cost."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import torch
from plain import PlainHandshake

from polyrl.errors import GroupLost
from polyrl.keys import TrainerKeys, read_keys
from polyrl.wire.sealing import LastingKeys
from polyrl_trainer.backend import OtherMachines
from polyrl_trainer.backends.fsdp.heartbeat import SILENT_S, RankHeartbeat
from polyrl_trainer.backends.fsdp.pods.other_pods import OtherPods
from polyrl_trainer.backends.weight_stream import write_stream
from polyrl_trainer.testing.memory_publisher import spread
from polyrl_trainer.weights.publisher import WeightPublisher

TENSORS: Final = 16


class Further(OtherMachines):
    """Machines that dial this one, as a trainer's pods do."""

    def __init__(self, number: int, port: int, key_file: Path) -> None:
        keys = read_keys(TrainerKeys, key_file)
        self._pods = OtherPods(number, port, LastingKeys.of(keys.secret_key, keys.public_key, keys.public_key))
        self._pods.watch(RankHeartbeat(SILENT_S), lambda *_: None)
        shares = self._pods.shares
        self.number, self.endpoints, self.ask = number, shares.endpoints, shares.ask

    def lost(self, error: OSError) -> GroupLost:
        return GroupLost(str(error))


def main(keys: Path, gigabytes: float, bind: str, *, plain: bool, pods: tuple[int, int] | None) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    publisher = WeightPublisher(keys, bind, keep=1, others=Further(*pods, keys) if pods else None)
    publisher.forms.smallest = sys.maxsize  # whole versions, however little a delta would have
    if plain:
        own = read_keys(TrainerKeys, keys)
        lasting = LastingKeys.of(own.secret_key, own.public_key, own.agent_public_key)
        publisher.server.handshake = lambda: PlainHandshake(lasting)
    elements = int(gigabytes * 1e9) // 2 // TENSORS
    names = [f"t{number}" for number in range(TENSORS)]
    tensors = {name: torch.frombuffer(bytearray(os.urandom(2 * elements)), dtype=torch.int16) for name in names}
    for line in sys.stdin:
        command, _, version = line.strip().partition(" ")
        answer: dict[str, object] = {"cpu": time.process_time()}
        if command == "publish":
            for tensor in tensors.values():
                tensor.add_(1)
            cpu, begun = time.process_time(), time.monotonic()
            copied = publisher.snapshot(partial(spread if pods else write_stream, tensors), {"config.json": b"{}"})
            ref = publisher.publish_snapshot(int(version), copied)
            answer = {"seconds": time.monotonic() - begun, "cpu": time.process_time() - cpu}
            answer |= {"endpoint": ref.endpoint, "others": ref.others, "public_key": ref.public_key}
            answer |= {"manifest_hash": ref.manifest_hash.hex(), "receipt": ref.receipt.hex()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    where = next((argument for argument in sys.argv[3:] if argument.startswith("tcp://")), "tcp://127.0.0.1:*")
    further = next((argument.removeprefix("pods=") for argument in sys.argv[3:] if argument.startswith("pods=")), "")
    number, _, port = further.partition(":")
    found = (int(number), int(port)) if further else None
    main(Path(sys.argv[1]), float(sys.argv[2]), where, plain="--plain" in sys.argv, pods=found)
