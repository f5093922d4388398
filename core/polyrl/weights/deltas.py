"""What changed between two streams of equal length, small: places and differences of 16-bit words, then zstandard.

    part      PART_BYTES of the stream, the last one shorter: uint32 size, then one zstandard frame
    frame     uint32[blocks] changed words of each block of BLOCK_WORDS
              uint16[n] place of each changed word: after the one before in its block, the first from the block's begin
              uint16[n] difference new - old, modulo 2^16, zigzag: +1 is 2, -1 is 1
              an odd last byte of the stream as it is

The uint16 are written as two planes, low bytes first: after a step most changes are by one, and most places are near
each other, so a plane is mostly zeros or a few values. Words are 16 bits wide whatever the dtype, which suits what is
published, and is lossless for all else. Beside XOR of words and zstandard (measured in `benchmarks/weights/deltas.py`)
this is half as large, and is applied many times as fast. Pure: a caller brings the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from polyrl.errors import ProtocolError
from polyrl.weights.manifest import Buffer, pieces

Words: TypeAlias = npt.NDArray[np.uint16]
Places: TypeAlias = npt.NDArray[np.int64]

PART_BYTES: Final = 4 << 20
"""Old and new fit into a core's cache, and a model has many for all cores."""
BLOCK_WORDS: Final = 1 << 16
"""As far as 16 bits reach."""
PREFIX_BYTES: Final = 4
LEVEL: Final = 1
"""Higher ones are slower here, and hardly smaller."""


EachOf: TypeAlias = Callable[..., Iterable[Any]]
"""`map`, or one that works on several at once."""


def encode_delta(old: Buffer, new: Buffer, each: EachOf = map) -> list[bytes]:
    """The parts of a delta, in order. Raises ValueError for streams of two lengths."""
    if memoryview(old).nbytes != memoryview(new).nbytes:
        raise ValueError("a delta is of streams of one length")
    return list(each(encode_part, pieces(old, PART_BYTES), pieces(new, PART_BYTES)))


def apply_delta(parts: Buffer, stream: memoryview, each: EachOf = map) -> None:
    """Makes the new stream of the old one, in place. Raises ProtocolError for what is no delta of such a stream, and
    has then written some of it."""
    cut = list(parts_of(memoryview(parts)))
    targets = list(pieces(stream, PART_BYTES))
    if len(cut) != len(targets):
        raise ProtocolError(f"a delta of {len(cut)} parts, where the stream has {len(targets)}")
    for _ in each(apply_part, cut, targets):
        pass


def num_changed(part: bytes, size: int) -> int:
    """Words that a part of `size` bytes of the stream changes."""
    return int(_counts(_content(memoryview(part)[PREFIX_BYTES:], size), size).sum())


def encode_part(old: Buffer, new: Buffer) -> bytes:
    """One part; both of at most PART_BYTES."""
    size = memoryview(new).nbytes
    differences = _words(new) - _words(old)
    places = _changed(differences)
    counts = np.bincount(places >> 16, minlength=_blocks(size)).astype("<u4")
    moved = differences[places]
    columns = (_steps(places, counts), (moved << 1) ^ (0 - (moved >> 15)).astype(np.uint16))
    planes = [(column >> shift).astype(np.uint8).tobytes() for column in columns for shift in (0, 8)]
    tail = bytes(memoryview(new)[size - size % 2 :])
    body = zstandard.ZstdCompressor(LEVEL).compress(b"".join((counts.tobytes(), *planes, tail)))
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def undo_part(body: Buffer, target: memoryview) -> None:
    """Makes of one part of the new stream the old one's. An odd last byte stays what it is. Raises ProtocolError."""
    apply_part(body, target, undo=True)


def apply_part(body: Buffer, target: memoryview, *, undo: bool = False) -> None:
    """Changes one part of the stream, or changes it back; `body` is without its size. Raises ProtocolError."""
    size = target.nbytes
    content = _content(body, size)
    counts = _counts(content, size)
    n, begin = int(counts.sum()), 4 * len(counts)
    if len(content) != begin + 4 * n + size % 2:
        raise ProtocolError("a delta's part is of another length than its counts say")
    planes = np.frombuffer(content, np.uint8, 4 * n, begin).reshape(4, n).astype(np.uint16)
    steps, zigzag = planes[0] | planes[1] << 8, planes[2] | planes[3] << 8
    places, words = _places(steps, counts), np.frombuffer(target, "<u2", size // 2)
    if n and (places[-1] >= len(words) or not (np.diff(places) > 0).all()):
        raise ProtocolError("a delta's part changes words that the stream does not have, or one twice")
    moved = (zigzag >> 1) ^ (0 - (zigzag & 1)).astype(np.uint16)
    words[places] += 0 - moved if undo else moved
    if size % 2 and not undo:
        target[-1:] = content[-1:]


def parts_of(parts: memoryview) -> Iterator[memoryview]:
    """The parts of a delta, each without its size. Raises ProtocolError."""
    at = 0
    while at < len(parts):
        end = at + PREFIX_BYTES + int.from_bytes(parts[at : at + PREFIX_BYTES], "little")
        if end > len(parts):
            raise ProtocolError("a delta ends within a part")
        yield parts[at + PREFIX_BYTES : end]
        at = end


def _content(body: Buffer, size: int) -> bytes:
    most = 4 * _blocks(size) + 2 * size + 1
    try:
        known = zstandard.frame_content_size(bytes(memoryview(body)[:18]))
        if not 0 <= known <= most:
            raise ProtocolError(f"a delta's part would be {known} bytes")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=most)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"a delta's part cannot be read: {error}") from None


def _counts(content: bytes, size: int) -> Places:
    blocks = _blocks(size)
    if len(content) < 4 * blocks:
        raise ProtocolError("a delta's part is too short")
    return np.frombuffer(content, "<u4", blocks).astype(np.int64)


def _blocks(size: int) -> int:
    return -(-(size // 2) // BLOCK_WORDS)


def _words(part: Buffer) -> Words:
    return np.frombuffer(part, "<u2", memoryview(part).nbytes // 2)


def _changed(differences: Words) -> Places:
    """Places that are not 0: by four words at once, since most are."""
    whole = len(differences) // 4 * 4
    some = np.flatnonzero(differences[:whole].view(np.uint64))
    near = (some[:, None] * 4 + np.arange(4)).ravel()
    every = np.concatenate((near, np.arange(whole, len(differences))))
    changed: Places = every[differences[every] != 0]
    return changed


def _steps(places: Places, counts: npt.NDArray[np.uint32]) -> Words:
    within = (places & (BLOCK_WORDS - 1)).astype(np.uint16)
    steps = np.diff(within, prepend=np.uint16(0))
    firsts = (np.cumsum(counts) - counts)[counts > 0]
    steps[firsts] = within[firsts]
    return steps


def _places(steps: Words, counts: Places) -> Places:
    sums = np.cumsum(steps, dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    before = np.concatenate(([0], sums))[firsts]
    places: Places = sums + np.repeat(np.arange(len(counts)) * BLOCK_WORDS - before, counts)
    return places
