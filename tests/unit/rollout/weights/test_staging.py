"""Pages of a version's file are used again, what lies in them already is not asked for, and full memory is refused."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from polyrl.errors import ProtocolError
from polyrl.weights import (
    VersionManifest,
    cut_chunks,
    encode_manifest,
    manifest_hash,
    missing_chunks,
    pieces,
    tensor_entry,
)
from polyrl.weights.deltas import encode_delta
from polyrl.wire import GetChunk, GetHeld
from polyrl.wire.inventory import decode_inventory
from polyrl_rollout.weights.pages import POPULATE_READ, WEIGHTS_FILE
from polyrl_rollout.weights.peers.shelf import Shelf
from polyrl_rollout.weights.staging import Partial, Staged, Staging, name_of

CHUNK = 64


def version(number: int, tensors: list[bytes]) -> VersionManifest:
    entries, offset = [], 0
    for index, data in enumerate(tensors):
        entries.append(tensor_entry(f"t{index}", "U8", (len(data),), offset, data))
        offset += len(data)
    chunks = cut_chunks(b"".join(tensors), CHUNK)
    return VersionManifest(number, None, kind="anchor", tensors=tuple(entries), chunks=chunks, files=())


def fill(partial: Partial, stream: bytes) -> list[str]:
    """Takes all that is missing; the tensors that became whole, in order."""
    data = {chunk.hash: piece for chunk, piece in zip(partial.manifest.chunks, pieces(stream, CHUNK), strict=True)}
    whole = []
    for chunk in missing_chunks(partial.manifest, partial.have):
        partial.place(chunk)[:] = data[chunk.hash]
        for tensor in partial.take(chunk):
            partial.verify_tensor(tensor)
            whole.append(tensor.name)
    return whole


def stage(staging: Staging, number: int, tensors: list[bytes]) -> Staged:
    partial = staging.open(version(number, tensors))
    fill(partial, b"".join(tensors))
    partial.verify()
    staged = staging.finish(partial)
    staging.keep_only(number)
    return staged


def content(seed: int) -> list[bytes]:
    return [bytes([seed + n]) * size for n, size in enumerate((100, 28, 0, 300))]


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging("run", "engine", tmp_path)
    yield staging
    staging.close()


def test_two_files_serve_all_versions(staging: Staging) -> None:
    inodes = set()
    for number in range(5):
        staged = stage(staging, number, content(number))
        inodes.add((staged.folder / "model.safetensors").stat().st_ino)
        assert (staged.folder / "model.safetensors").read_bytes().endswith(b"".join(content(number)))
    assert len(inodes) == 2
    assert [path.name[:7] for path in sorted(staging.root.iterdir())] == [".lock", ".turn", "v000003", "v000004"]


def _maps(staging: Staging) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(staging.root) in line]


def test_two_maps_serve_all_versions(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """To map pages again took a third of a receiver's time."""
    made, populated = list[int](), list[int]()

    class Counted(mmap.mmap):
        def __init__(self, *of: object) -> None:
            made.append(len(populated))

        def madvise(self, *of: object) -> None:
            populated.append(len(made))

    monkeypatch.setattr("polyrl_rollout.weights.pages.mmap.mmap", Counted)
    for number in range(5):
        stage(staging, number, content(number))
    assert len(made) == 2
    assert set(populated) == {1, 2}
    assert len(populated) == 2 * len(set(version(0, content(0)).chunks))  # each page once


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_the_map_of_a_file_that_is_removed_keeps_no_memory(staging: Staging) -> None:
    for number in range(3):
        stage(staging, number, content(number))
    assert len(_maps(staging)) == 2
    partial = staging.open(version(3, [b"x" * 10_000]))
    assert not any("deleted" in line for line in _maps(staging))
    del partial
    staging.close()
    assert not _maps(staging)


def test_chunks_of_a_delta_say_nothing_of_where_tensors_lie(staging: Staging) -> None:
    """Of the served version, and of the one whose file is used again."""
    served = stage(staging, 0, content(0))
    as_delta = msgspec.structs.replace(served.manifest, version=1, base=0, kind="delta", base_hash=b"x" * 16)
    by_delta = replace(served, manifest=as_delta)
    partial = staging.open(version(2, content(0)))
    partial.reuse(by_delta)
    assert partial.have == set()
    partial.reuse(served)
    assert partial.have == {chunk.hash for chunk in served.manifest.chunks}
    staging.finish(partial)
    partial.file.manifest = as_delta
    staging._known[partial.file.path.parent] = as_delta
    staging.keep_only(0)
    assert staging.open(version(3, content(0))).have == set()


def test_a_delta_is_applied_to_its_base_alone(staging: Staging) -> None:
    old, new = content(0), [*content(0)[:3], bytes([9]) * 300]
    served = stage(staging, 4, old)
    delta = b"".join(encode_delta(b"".join(old), b"".join(new)))
    manifest = msgspec.structs.replace(version(5, new), base=4, kind="delta", base_hash=b"x" * 16)
    for wrong in (
        msgspec.structs.replace(manifest, base=3),
        msgspec.structs.replace(manifest, tensors=version(5, [*old, b"more"]).tensors),
    ):
        with pytest.raises(ProtocolError, match="no delta on version 4"):
            staging.copy_of(served).apply(wrong, memoryview(delta), map)
    partial = staging.copy_of(served)
    partial.apply(manifest, memoryview(delta), map)
    partial.verify()
    staged = staging.finish(partial)
    assert (staged.folder / "model.safetensors").read_bytes().endswith(b"".join(new))
    assert (served.folder / "model.safetensors").read_bytes().endswith(b"".join(old))


def test_what_deltas_have_changed_is_no_longer_in_its_inventory(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others asked for it, got none, and left this agent for seconds when they had asked often enough."""
    # A list that took long is given again for a while, and on a machine that others want any may.
    monkeypatch.setattr("polyrl_rollout.weights.peers.shelf.COSTLY_S", inf)
    old, new, shelf = content(0), [*content(0)[:3], bytes([9]) * 300], Shelf()
    partial = staging.open(version(4, old))
    fill(partial, b"".join(old))
    shelf.arrives(partial.manifest, partial, set())
    name, chunk = manifest_hash(encode_manifest(partial.manifest)), partial.manifest.chunks[0]

    def claimed() -> npt.NDArray[np.bool_]:
        found = shelf.find(GetHeld(name))
        assert found is not None
        return decode_inventory(bytes(found.data), len(version(4, old).chunks)).held

    assert claimed().all()
    assert shelf.find(GetChunk(4, chunk.hash)) is not None
    manifest = msgspec.structs.replace(version(5, new), base=4, kind="delta", base_hash=name)
    partial.apply(manifest, memoryview(b"".join(encode_delta(b"".join(old), b"".join(new)))), map)
    assert shelf.find(GetChunk(4, chunk.hash)) is None
    assert not claimed().any()


def test_a_file_of_another_size_is_not_used_again(staging: Staging) -> None:
    for number, tensors in enumerate([content(0), content(1), [b"x" * 70], content(2)]):
        staged = stage(staging, number, tensors)
        assert (staged.folder / "model.safetensors").read_bytes().endswith(b"".join(tensors))


def test_what_lies_there_already_is_not_asked_for(staging: Staging) -> None:
    stage(staging, 0, content(0))
    stage(staging, 1, content(1))
    changed = [*content(0)[:3], content(9)[3]]
    partial = staging.open(version(2, changed))
    assert partial.have == {chunk.hash for chunk in cut_chunks(b"".join(content(0)), CHUNK)} & {
        chunk.hash for chunk in partial.manifest.chunks
    }
    assert partial.have
    fill(partial, b"".join(changed))
    partial.verify()


def test_tensors_are_whole_by_their_last_chunk(staging: Staging) -> None:
    partial = staging.open(version(0, content(0)))
    assert fill(partial, b"".join(content(0))) == ["t0", "t1", "t3"]
    partial.verify()


def test_false_bytes_are_found_and_only_they_are_asked_for_again(staging: Staging) -> None:
    tensors = [os.urandom(300), os.urandom(40)]
    manifest = version(0, tensors)
    partial = staging.open(manifest)
    stream = b"".join(tensors)
    fill(partial, stream[:130] + bytes([stream[130] ^ 1]) + stream[131:])
    with pytest.raises(ProtocolError, match="tensor t0 of version 0"):
        partial.verify()
    assert partial.drop_false() == 1
    assert missing_chunks(manifest, partial.have) == [manifest.chunks[2]]
    assert fill(partial, stream) == []
    partial.verify()


def test_full_memory_is_refused_when_the_file_is_made(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        staging.open(version(0, content(0)))
    assert not list(staging.root.glob("v*/*")), "what was begun is gone"


@pytest.mark.parametrize("number", [0, 1])
def test_one_that_was_killed_as_it_took_room_leaves_nothing_to_stumble_over(staging: Staging, number: int) -> None:
    """The kernel gives a file its size when it has all of its room, a second later with gigabytes."""
    manifest = version(number, content(0))
    left = staging.root / f"{name_of(version(0, content(0)))}.partial"
    left.mkdir()
    (left / WEIGHTS_FILE).touch()
    fill(staging.open(manifest), b"".join(content(0)))
    assert [path.name for path in staging.root.glob("v*")] == [f"{name_of(manifest)}.partial"]


def test_what_an_interrupted_pull_left_stays_until_another_version_comes(staging: Staging) -> None:
    first = version(0, content(0))
    partial = staging.open(first)
    partial.place(first.chunks[0])[:] = content(0)[0][:CHUNK]
    partial.take(first.chunks[0])
    assert staging.open(first) is partial
    assert staging.open(version(1, content(1))).have == set()
    assert [path.name for path in staging.root.glob("v*")] == [f"{name_of(version(1, content(1)))}.partial"]


def _maps_at_once() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page, contextlib.suppress(OSError):
        page.madvise(POPULATE_READ)
        return os.access("/dev/shm", os.W_OK)
    return False


@pytest.mark.skipif(not _maps_at_once(), reason="files in memory, on Linux 5.14 or newer, are meant")
def test_writing_a_chunk_maps_its_pages_at_once_and_not_one_by_one() -> None:
    """Half of a receiver's time went into a fault for each page."""
    size = 8 << 20
    staging = Staging("run", f"pages-{os.getpid()}", Path("/dev/shm"))
    try:
        stream = bytes(size)
        entry = tensor_entry("t", "U8", (size,), 0, stream)
        chunks = cut_chunks(stream, size)
        manifest = VersionManifest(1, None, kind="anchor", tensors=(entry,), chunks=chunks, files=())
        place = staging.open(manifest).place(chunks[0])
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        place[:] = stream
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    finally:
        staging.close()
    assert faults < size // resource.getpagesize() // 8
