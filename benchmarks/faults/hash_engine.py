"""The embedded engine's process without a model: `python hash_engine.py FD`, FD a socket to the agent's engine port.

Each token is a hash of the weights' bytes and of all ids before it: wrong weights, a lost or a doubled token change
everything after. It speaks the messages of `polyrl_rollout.engines.embedded.messages`, so that everything above it is
the product, and it starts in a third of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polyrl.sample import Finish
from polyrl_rollout.engines.embedded.messages import (
    LENGTH,
    Abort,
    Generate,
    Load,
    Loaded,
    Ping,
    Pong,
    Row,
    Started,
    StartEngine,
    Tokens,
    ToParent,
    ToProcess,
    decode_to_process,
    frame,
)
from polyrl_rollout.engines.port import LoadSeconds

VOCABULARY: Final = 1000

TICK_S: Final = 0.01
"""Between two tokens of every sequence."""

LOGPROB: Final = -0.5


@dataclass
class Running:
    """One request."""

    state: int
    """Hash of the weights and all ids so far."""
    left: int


class HashEngine:
    """All requests at once, a token each per tick."""

    def __init__(self) -> None:
        self._version, self._salt = -1, 0
        self._running: dict[str, Running] = {}
        self._work = asyncio.Event()

    def take(self, message: ToProcess) -> ToParent | None:
        """Carries a message out; returns the answer, where it wants one."""
        match message:
            case StartEngine():
                return Started(message.capacity)
            case Generate(request):
                self._running[request.rid] = Running(hashed(self._salt, request.input_ids), request.max_new_tokens)
                self._work.set()
            case Abort():
                self._running.pop(message.rid, None)
            case Load():
                self._running.clear()
                self._version, self._salt = message.version, salt_of(Path(message.folder))
                return Loaded(message.version, LoadSeconds(wait=0.0, load=0.0, verify=0.0))
            case Ping():
                return Pong()
        return None

    async def generate(self, writer: asyncio.StreamWriter) -> None:
        """For as long as the process lives."""
        while True:
            await self._work.wait()
            await asyncio.sleep(TICK_S)
            writer.write(frame(Tokens(self._version, [self._next(rid) for rid in list(self._running)])))
            await writer.drain()
            if not self._running:
                self._work.clear()

    def _next(self, rid: str) -> Row:
        request = self._running[rid]
        token = request.state % VOCABULARY
        request.state, request.left = hashed(request.state, [token]), request.left - 1
        if request.left:
            return Row(rid, [token], logprobs=[LOGPROB], finish=None)
        del self._running[rid]
        return Row(rid, [token], logprobs=[LOGPROB], finish=Finish.LENGTH)


def hashed(state: int, ids: list[int]) -> int:
    """32 bits; hashing piece by piece gives what hashing at once gives."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in ids), state)


def salt_of(folder: Path) -> int:
    """Of the weights alone: the data of model.safetensors, after its header."""
    content = (folder / "model.safetensors").read_bytes()
    return salt_of_data(content[8 + int.from_bytes(content[:8], "little") :])


def salt_of_data(data: bytes) -> int:
    """Of the tensors' bytes."""
    return zlib.crc32(data)


async def serve(sock: socket.socket) -> None:
    """Until the other end is closed."""
    reader, writer = await asyncio.open_connection(sock=sock)
    engine = HashEngine()
    generating = asyncio.create_task(engine.generate(writer))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            answer = engine.take(decode_to_process(await reader.readexactly(length)))
            if answer is not None:
                writer.write(frame(answer))
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
