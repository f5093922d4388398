"""Bytes from one process to another by the Mooncake transfer engine over TCP, for `run`; needs nothing but the engine.

    tests/sglang/confine.sh PYTHON benchmarks/weights/processes/mooncake_copy.py BYTES

PYTHON has `mooncake-transfer-engine-non-cuda` (and the system libibverbs1). The engine listens on all addresses without
a key, and whoever reaches it may write what is registered: hence the confinement to a loopback of its own. Reads, as a
receiver would, in as many pieces as a pull has streams, from warm memory into warm memory. Prints bytes per second, the
median of ROUNDS.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Final

HOST: Final = "127.0.0.1"
ROUNDS: Final = 3
PIECES: Final = 4
WORD: Final = "at "
"""The engine writes its log to the same output."""


def buffer(size: int) -> tuple[mmap.mmap, int]:
    """Touched memory, and its address."""
    memory = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def engine_of(address: int, size: int) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") or engine.register_memory(address, size):
        sys.exit("the transfer engine does not start; its reason stands above")
    return engine


def serve(size: int) -> None:
    """Until its input ends."""
    memory, address = buffer(size)
    memory[: 1 << 20] = os.urandom(1 << 20)
    engine = engine_of(address, size)
    print(f"{WORD}{HOST}:{engine.get_rpc_port()} {address}", flush=True)
    sys.stdin.read()


def measure(size: int) -> float:
    argv = [sys.executable, __file__, str(size), "serve"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        line = next(line for line in child.stdout if line.startswith(WORD))
        target, there = line.removeprefix(WORD).split()
        memory, here = buffer(size)
        engine, piece, speeds = engine_of(here, size), size // PIECES, []
        begins = [number * piece for number in range(PIECES)]
        for _ in range(ROUNDS):
            begun = time.monotonic()
            code = engine.batch_transfer_sync_read(
                target, [here + at for at in begins], [int(there) + at for at in begins], [piece] * PIECES
            )
            speeds.append(piece * PIECES / (time.monotonic() - begun))
            if code or not any(memory[: 1 << 20]):
                sys.exit(f"the transfer engine brought nothing: {code}")
        return statistics.median(speeds)
    finally:
        child.kill()
        child.wait(10)


if __name__ == "__main__":
    if sys.argv[2:] == ["serve"]:
        serve(int(sys.argv[1]))
    else:
        print(f"speed {measure(int(sys.argv[1])):.0f}", flush=True)
