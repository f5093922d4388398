"""Which machine of a learner holds, checks and sends which part of a version.

The tensors' stream is cut between tensors, where that is most even, since a checksum is of a whole tensor. A piece of
the stream, a chunk or a part of a delta, is that machine's in whose share it begins; so a share is held as far as its
last piece reaches into the next one. Of a delta, whose bytes have no tensors, chunks are dealt out in equal runs.

A receiver knows by the manifest and the number of machines whom to ask: nothing more is announced.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from polyrl.weights.deltas import PART_BYTES
from polyrl.weights.manifest import TensorEntry, VersionManifest

HELD_TO: Final = PART_BYTES
"""Bytes to a multiple of which a share is held: a multiple of a chunk's, too."""


class StreamShare(msgspec.Struct, frozen=True):
    """One machine's share, in bytes of the stream."""

    begin: int
    end: int
    """Where its tensors begin and end."""
    held: int
    """How far its last piece may reach."""

    def pieces(self, size: int) -> tuple[int, int]:
        """Begin and end of the pieces of `size`, which divides HELD_TO, that begin in it."""
        end = min(_up(self.end, size), self.held)
        return min(_up(self.begin, size), end), end


def share_stream(tensors: Sequence[TensorEntry], machines: int) -> list[StreamShare]:
    """A share for each machine, in their order; one may be empty."""
    total = tensors[-1].offset + tensors[-1].size if tensors else 0
    cuts = [*(tensor.offset for tensor in tensors), total]
    ends = [min(cuts, key=lambda cut: abs(cut * machines - total * number)) for number in range(machines + 1)]
    return [StreamShare(begin, end, held=min(total, _up(end, HELD_TO))) for begin, end in pairwise(ends)]


def machine_of(offset: int, shares: Sequence[StreamShare]) -> int:
    """In whose share what lies there begins."""
    return bisect_right(shares, offset, key=lambda share: share.begin) - 1


def chunk_machines(manifest: VersionManifest, machines: int) -> list[int]:
    """Whose each of its chunks is."""
    number = len(manifest.chunks)
    if manifest.base is not None:
        return [place * machines // number for place in range(number)]
    shares = share_stream(manifest.tensors, machines)
    offsets = accumulate((chunk.size for chunk in manifest.chunks[:-1]), initial=0)
    return [machine_of(offset, shares) for offset in offsets][:number]


def _up(offset: int, size: int) -> int:
    return -(-offset // size) * size
