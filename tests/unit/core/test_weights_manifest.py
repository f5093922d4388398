"""Weight versions as values: what is cut can be put together again, and no false claim gets past the checks."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, strategies as st

from polyrl.errors import ProtocolError
from polyrl.weights import (
    ChunkEntry,
    StreamCheck,
    TensorEntry,
    VersionManifest,
    check_manifest,
    chunk_places,
    cut_chunks,
    decode_manifest,
    digest,
    encode_manifest,
    file_entry,
    manifest as manifest_module,
    manifest_hash,
    missing_chunks,
    pieces,
    receipt_of,
    tensor_entry,
)


@dataclass(frozen=True)
class Made:
    manifest: VersionManifest
    chunks: dict[bytes, bytes]
    stream: bytes


def make(tensors: list[bytes], chunk_bytes: int = 16, version: int = 3) -> Made:
    entries, offset = [], 0
    for index, data in enumerate(tensors):
        entries.append(tensor_entry(f"t{index}", "U8", (len(data),), offset, data))
        offset += len(data)
    stream = b"".join(tensors)
    chunks = cut_chunks(stream, chunk_bytes)
    files = (file_entry("config.json", b"{}"),)
    manifest = VersionManifest(version, None, kind="anchor", tensors=tuple(entries), chunks=chunks, files=files)
    data = (bytes(piece) for piece in pieces(stream, chunk_bytes))
    return Made(manifest, {chunk.hash: one for chunk, one in zip(chunks, data, strict=True)}, stream=stream)


tensor_lists = st.lists(st.binary(max_size=70), max_size=8)


@given(tensor_lists, st.integers(1, 40))
def test_cut_chunks_put_together_are_the_stream(tensors: list[bytes], chunk_bytes: int) -> None:
    made = make(tensors, chunk_bytes)
    check_manifest(made.manifest)
    assert [chunk.size for chunk in made.manifest.chunks] == [
        min(chunk_bytes, len(made.stream) - start) for start in range(0, len(made.stream), chunk_bytes)
    ]
    stream = bytearray(len(made.stream))
    for hash_, places in chunk_places(made.manifest).items():
        for offset, size in places:
            stream[offset : offset + size] = made.chunks[hash_]
    assert bytes(stream) == made.stream
    assert all(map(StreamCheck(memoryview(stream)).matches, made.manifest.tensors))


@given(st.lists(st.integers(0, 3000), max_size=8), st.integers(1, 5000), st.randoms(use_true_random=False))
def test_what_was_gathered_while_tensors_were_checked_is_the_streams_receipt(
    sizes: list[int], at_once: int, random: Random
) -> None:
    made = make([random.randbytes(size) for size in sizes], chunk_bytes=64)
    with mock.patch.object(manifest_module, "CHECKED_AT_ONCE", at_once):
        check = StreamCheck(memoryview(bytearray(made.stream)))
        tensors = list(made.manifest.tensors)
        random.shuffle(tensors)
        assert all(map(check.matches, tensors))
    assert check.receipt() == receipt_of(made.stream)


def test_a_receipt_takes_every_part_of_the_stream() -> None:
    """Nothing that a manifest or a neighbouring version tells makes up for one that is missing."""
    chunks = [bytes([number]) * 5000 for number in range(4)]
    whole = receipt_of(b"".join(chunks))
    for number in range(4):
        changed = [*chunks]
        changed[number] = b"\xff" * 1024 + chunks[number][1024:]
        assert receipt_of(b"".join(changed)) != whole
    hashes = [digest(chunk) for chunk in chunks]
    assert whole not in (digest(b"".join(chunks)), digest(b"".join(hashes)), digest(chunks[0]))
    assert receipt_of(b"".join(chunks)) == whole
    assert receipt_of(b"x") != digest(b"x"), "a chunk's hash is in the manifest"


@given(tensor_lists, st.data())
def test_missing_chunks_and_held_ones_are_all_and_disjoint(tensors: list[bytes], data: st.DataObject) -> None:
    made = make(tensors)
    have = data.draw(st.sets(st.sampled_from(sorted(made.chunks)))) if made.chunks else set()
    missing = [chunk.hash for chunk in missing_chunks(made.manifest, have)]
    assert len(missing) == len(set(missing))
    assert set(missing) == set(made.chunks) - have


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_changed_byte_is_noticed(content: bytes, data: st.DataObject) -> None:
    made = make([content], chunk_bytes=64)
    index = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[index] ^= data.draw(st.integers(1, 255))
    assert digest(content) == made.manifest.chunks[0].hash != digest(changed)
    assert not StreamCheck(memoryview(changed)).matches(made.manifest.tensors[0])


def test_manifest_survives_its_bytes_and_refuses_others() -> None:
    made = make([b"a" * 40, b"b" * 9])
    body = encode_manifest(made.manifest)
    assert decode_manifest(body, manifest_hash(body), run_epoch=1) == made.manifest
    with pytest.raises(ProtocolError, match="not the announced one"):
        decode_manifest(body + b"\0", manifest_hash(body), run_epoch=1)
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_manifest(b"\xc1", manifest_hash(b"\xc1"), run_epoch=1)


def test_a_release_without_the_start_of_the_run_names_manifests_alike() -> None:
    """Receivers name what they hold by what they encode: of another name no delta would rest on it."""
    earlier: Any = msgspec.defstruct(
        "Earlier",
        [(field.name, field.type) for field in msgspec.structs.fields(VersionManifest) if field.name != "run_epoch"],
        array_like=True,
    )
    body = encode_manifest(replaced())
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(body, type=earlier)) == body
    assert encode_manifest(decode_manifest(body, manifest_hash(body), run_epoch=1)) == body


@pytest.mark.parametrize("other", [1, 3], ids=["an earlier one", "a later one"])
def test_a_manifest_of_another_start_of_the_run_is_refused(other: int) -> None:
    """An earlier one gave the same number to other weights."""
    body = encode_manifest(replaced(run_epoch=2))
    assert decode_manifest(body, manifest_hash(body), run_epoch=2).run_epoch == 2
    with pytest.raises(ProtocolError, match=f"version 3 was made in start 2 of the run, and this is start {other}"):
        decode_manifest(body, manifest_hash(body), run_epoch=other)


def replaced(**changes: object) -> VersionManifest:
    return msgspec.structs.replace(make([b"a" * 40, b"b" * 9]).manifest, **changes)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        pytest.param(replaced(chunks=()), "tensors end at byte 49, chunks at byte 0", id="no chunks"),
        pytest.param(replaced(chunks=(ChunkEntry(b"x" * 16, 0),)), "impossible size", id="an empty chunk"),
        pytest.param(replaced(chunks=(ChunkEntry(b"x", 49),)), "impossible size", id="a short hash"),
        pytest.param(
            replaced(tensors=(TensorEntry("t", "U8", shape=(4,), offset=4, size=4, checksum=b""),)),
            "impossible place",
            id="a gap before a tensor",
        ),
        pytest.param(
            replaced(tensors=(TensorEntry("t", "F32", shape=(4,), offset=0, size=4, checksum=b""),)),
            "impossible place or size",
            id="less than its shape needs",
        ),
        pytest.param(
            replaced(tensors=(TensorEntry("t", "F3", shape=(4,), offset=0, size=4, checksum=b""),)),
            "dtype F3",
            id="no such dtype",
        ),
        pytest.param(
            replaced(tensors=(TensorEntry("t", "U8", shape=(-1, -4), offset=0, size=4, checksum=b""),)),
            "shape",
            id="a negative size",
        ),
        pytest.param(
            replaced(tensors=(TensorEntry("t", "U8", shape=(0,), offset=0, size=0, checksum=b""),) * 2),
            "two tensors have one name",
            id="one name twice",
        ),
        pytest.param(
            replaced(tensors=(TensorEntry("__metadata__", "U8", shape=(49,), offset=0, size=49, checksum=b""),)),
            "may not be called __metadata__",
            id="a name that is the file's own",
        ),
        pytest.param(
            replaced(chunks=(ChunkEntry(b"x" * 16, 40), ChunkEntry(b"x" * 16, 9))),
            "one hash and two sizes",
            id="two chunks that cannot both be what one hash says",
        ),
        pytest.param(replaced(version=-1), "version -1", id="a number that means none"),
        pytest.param(replaced(files=(file_entry("../evil", b""),)), "may not be called", id="a path out of the folder"),
        pytest.param(replaced(files=(file_entry(".hidden", b""),)), "may not be called", id="a hidden file"),
        pytest.param(
            replaced(files=(file_entry("model.safetensors", b""),)), "may not be called", id="a name that is ours"
        ),
        pytest.param(
            replaced(files=(msgspec.structs.replace(file_entry("a", b"1"), content=b"2"),)),
            "another hash",
            id="content of another hash",
        ),
        pytest.param(replaced(files=(file_entry("a", b""),) * 65), "more than 64 files", id="too many files"),
        pytest.param(replaced(files=(file_entry("a", b""),) * 2), "two files have one name", id="one file twice"),
    ],
)
def test_impossible_manifests_are_refused(manifest: VersionManifest, message: str) -> None:
    body = encode_manifest(manifest)
    with pytest.raises(ProtocolError, match=message):
        decode_manifest(body, manifest_hash(body), run_epoch=1)
