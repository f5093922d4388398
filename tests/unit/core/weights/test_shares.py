"""Every byte of a version is one machine's, and each machine holds what it hashes, encodes and sends."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from polyrl.weights import (
    ChunkEntry,
    TensorEntry,
    VersionManifest,
    chunk_entry,
    receipt_of,
    receipt_of_sample,
    receipt_sample,
)
from polyrl.weights.deltas import PART_BYTES
from polyrl.weights.shares import HELD_TO, chunk_machines, machine_of, share_stream

MiB = 1 << 20


def tensors_of(sizes: list[int]) -> list[TensorEntry]:
    made, offset = list[TensorEntry](), 0
    for number, size in enumerate(sizes):
        made.append(TensorEntry(f"t{number}", "U8", shape=(size,), offset=offset, size=size, checksum=b""))
        offset += size
    return made


@given(st.lists(st.integers(0, 9 * MiB), max_size=12), st.integers(1, 6), st.sampled_from([64 << 10, MiB, PART_BYTES]))
def test_pieces_of_all_shares_are_those_of_the_stream_and_each_is_held(
    sizes: list[int], machines: int, piece: int
) -> None:
    tensors, total, at = tensors_of(sizes), sum(sizes), 0
    shares = share_stream(tensors, machines)
    assert [len(shares), shares[0].begin, shares[-1].end] == [machines, 0, total]
    for share in shares:
        begin, end = share.pieces(piece)
        assert share.begin <= begin <= end <= share.held <= min(total, share.end + HELD_TO)
        if begin < end:
            assert (begin, begin % piece) == (at, 0)
            assert end % piece == 0 or end == total
            at = end
    assert at == total
    for tensor in tensors:
        share = shares[machine_of(tensor.offset, shares)]
        assert share.begin <= tensor.offset <= tensor.offset + tensor.size <= share.end, "a checksum is of all of it"


@given(st.lists(st.integers(0, 5 * MiB), min_size=1, max_size=40), st.integers(2, 6))
def test_no_share_is_larger_than_its_part_and_a_tensor(sizes: list[int], machines: int) -> None:
    for share in share_stream(tensors_of(sizes), machines):
        assert share.end - share.begin <= sum(sizes) / machines + max(sizes)


@given(st.lists(st.integers(0, 9 * MiB), max_size=12), st.integers(1, 6), st.sampled_from([MiB, PART_BYTES]))
def test_receivers_know_whose_each_chunk_is(sizes: list[int], machines: int, piece: int) -> None:
    tensors, total = tensors_of(sizes), sum(sizes)
    begins = range(0, total, piece)
    chunks = tuple(ChunkEntry(b"%016d" % begin, min(piece, total - begin)) for begin in begins)
    manifest = VersionManifest(0, None, kind="anchor", tensors=tuple(tensors), chunks=chunks, files=())
    places = [share.pieces(piece) for share in share_stream(tensors, machines)]
    for begin, machine in zip(begins, chunk_machines(manifest, machines), strict=True):
        assert places[machine][0] <= begin < places[machine][1]


@pytest.mark.parametrize(
    ("number", "machines", "wanted"),
    [(1, 4, [0]), (4, 2, [0, 0, 1, 1]), (3, 2, [0, 0, 1]), (0, 2, []), (3, 1, [0] * 3)],
    ids=["fewer than machines", "even", "uneven", "none", "of one machine"],
)
def test_chunks_of_a_delta_are_dealt_out_in_equal_runs(number: int, machines: int, wanted: list[int]) -> None:
    chunks = tuple(chunk_entry(bytes([one])) for one in range(number))
    tensors = tuple(tensors_of([100]))
    manifest = VersionManifest(1, 0, kind="delta", tensors=tensors, chunks=chunks, files=(), base_hash=b"0" * 16)
    assert chunk_machines(manifest, machines) == wanted


@given(st.lists(st.binary(max_size=5000), min_size=1, max_size=6))
def test_a_receipt_is_made_of_what_it_takes_of_each_part(parts: list[bytes]) -> None:
    begins = [sum(map(len, parts[:number])) for number in range(len(parts))]
    sample = b"".join(receipt_sample(part, begin) for part, begin in zip(parts, begins, strict=True))
    assert receipt_of_sample(sample) == receipt_of(b"".join(parts))
