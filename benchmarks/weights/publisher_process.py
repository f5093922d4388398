"""A publisher for `run` and `joiners`: publishes what it is asked for, line by line, and says what it cost."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

import structlog
import torch
from plain import PlainHandshake

from polyrl.keys import TrainerKeys, read_keys
from polyrl.wire.sealing import LastingKeys
from polyrl_trainer.weights.publisher import WeightPublisher

TENSORS: Final = 16


def main(keys: Path, gigabytes: float, bind: str, *, plain: bool) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    publisher = WeightPublisher(keys, bind, keep=1)
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
            ref = publisher.publish(int(version), tensors.items(), {"config.json": b"{}"})
            answer = {"seconds": time.monotonic() - begun, "cpu": time.process_time() - cpu}
            answer |= {"endpoint": ref.endpoint, "public_key": ref.public_key}
            answer |= {"manifest_hash": ref.manifest_hash.hex(), "receipt": ref.receipt.hex()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    where = next((argument for argument in sys.argv[3:] if argument.startswith("tcp://")), "tcp://127.0.0.1:*")
    main(Path(sys.argv[1]), float(sys.argv[2]), where, plain="--plain" in sys.argv)
