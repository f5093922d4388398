"""A chunk that was taken to be asked for is asked for again, whatever becomes of the connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polyrl.weights import ChunkEntry, VersionManifest, WeightsRef
from polyrl.wire import GetChunk
from polyrl_rollout.weights.transfer import Transfer

CHUNKS = [ChunkEntry(bytes([number]) * 32, 4) for number in range(6)]


MANIFEST = VersionManifest(0, None, kind="anchor", tensors=(), chunks=tuple(CHUNKS), files=())


class Connection:
    """Breaks at one of the things that are done with it."""

    def __init__(self, left: list[str]) -> None:
        self._left = left

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def ask(self, request: GetChunk) -> bytes:
        self._pass("ask")
        return request.hash

    def answer(self, about: bytes, place: Callable[[int], memoryview]) -> bool:
        self._pass("answer")
        place(4)[:] = about[:4]
        return True

    def _pass(self, what: str) -> None:
        if self._left and self._left.pop(0) == f"{what} breaks":
            raise ConnectionResetError


class Places:
    """Where chunks come to lie."""

    def __init__(self) -> None:
        self.came = list[bytes]()

    def place(self, _chunk: ChunkEntry) -> memoryview:
        return memoryview(bytearray(4))

    def take(self, chunk: ChunkEntry) -> list[Any]:
        self.came.append(chunk.hash)
        return []


@pytest.mark.parametrize("fault", ["ask breaks", "answer breaks"])
@pytest.mark.parametrize("at", range(8))
def test_no_chunk_is_lost_with_its_connection(fault: str, at: int) -> None:
    steps, places = ["goes on"] * at + [fault], Places()
    transfer = Transfer(WeightsRef(0), lambda *_: Connection(steps), 1.0, 5.0, streams=1)  # type: ignore[arg-type, return-value]
    transfer.chunks(MANIFEST, CHUNKS, places)  # type: ignore[arg-type]
    assert sorted(places.came) == [chunk.hash for chunk in CHUNKS]
