"""A receiver for `joiners` and `host`: says how others know it, reads whom and what to pull, says when it has it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

import structlog

from polyrl import wire
from polyrl.keys import AgentKeys, read_keys
from polyrl.weights import WeightsRef
from polyrl_rollout.weights.peers.swarm import Swarm
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staging


def main(keys: Path, name: str, host: str, key: str, *, exchanges: bool) -> None:
    """Lines of its input: a frame of the manager as hexadecimal, `wire.Peers` and then `wire.Announce`. Receivers of
    one `key` share a folder."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    staging, swarm = Staging("joiners", key), Swarm(name, 0, host) if exchanges else None
    puller = Puller(read_keys(AgentKeys, keys), staging, swarm=swarm)
    print(json.dumps({"key": swarm.public_key.hex() if swarm else "", "port": swarm.port if swarm else 0}), flush=True)
    for line in sys.stdin:
        message = wire.decode_to_agent(bytes.fromhex(line))
        if isinstance(message, wire.Peers) and swarm is not None:
            swarm.update(message)
        elif isinstance(message, wire.Announce):
            threading.Thread(target=pull, args=(puller, staging, message.weights), daemon=True).start()
    staging.close()


def pull(puller: Puller, staging: Staging, ref: WeightsRef) -> None:
    cpu = time.process_time()
    pulled = asyncio.run(puller.pull(ref, None))
    staging.keep_only(ref.version)
    got = {"receipt": pulled.staged.receipt.hex(), "bytes": pulled.bytes_pulled, "fromPeers": pulled.bytes_from_peers}
    got |= {"cpu": time.process_time() - cpu}
    print(json.dumps(got), flush=True)


if __name__ == "__main__":
    shared = next((word.removeprefix("--key=") for word in sys.argv[4:] if word.startswith("--key=")), sys.argv[2])
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], shared, exchanges="--alone" not in sys.argv)
