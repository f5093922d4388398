"""A weight version as a value: tensors that tile one byte stream, chunks of it by content hash, small files.

A publisher cuts the stream (`cut_chunks`), a puller asks only for chunks whose hash it lacks (`missing_chunks`), and
nobody serves a version before every tensor matched (`StreamCheck`). The manifest is named by the hash of its own
bytes, which the manager announces, so a publisher cannot change its mind later.

Names are BLAKE3, 16 bytes of it: beyond forging by accident or intent. Tensors are checked by XXH3, which is seven
times as fast and withstands accidents alone: what it is compared with stands in a manifest that is named by BLAKE3, and
bytes that are not the publisher's own are refused by who receives them.
An anchor's stream is the tensors themselves. A delta's is what changed since another version, its base, as `deltas`
writes it; its checksums are those of the result, and it names its base by the hash of that manifest, so the newest name
vouches for the whole chain down to an anchor. Of an anchor whose chunks are partly there only the others are pulled.

It also names the start of the run that it was made in. A run that goes on from an older checkpoint gives numbers out a
second time, for other weights. Where keys are drawn at each start, as `polyrl run` does, who is left over from an
earlier one can say nothing to anybody. Where somebody starts the processes and keeps the keys, this is what has engines
refuse such a version, whoever announced it. Another run's is refused by its keys; a pod's job has one start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Final, Literal, TypeAlias

import blake3
import msgspec
import numpy as np
import xxhash

from polyrl.errors import UNDECODABLE, ProtocolError

Buffer: TypeAlias = bytes | bytearray | memoryview

HASH_BYTES: Final = 16
RECEIPT_CONTEXT: Final = "polyrl weights receipt"
CHECKED_AT_ONCE: Final = 1 << 20
"""Bytes: still in the processor's cache when they are read again."""
RECEIPT_STRIDE: Final = 1024
"""Bytes of the stream to one that counts for a receipt: the lowest of a number, which a step of training changes most
often. A receipt costs a thousandth of the hashes."""
CHUNK_BYTES: Final = 4 << 20
"""Bytes of a chunk: big enough that its round trip is lost in its transfer, small enough to be asked for again."""
MAX_CHUNK_BYTES: Final = 32 << 20
"""Largest chunk a puller accepts; with its envelope it stays below the wire's largest frame."""
MAX_FILES: Final = 64
TOKENIZER_FILE: Final = "tokenizer.json"
"""Among the small files where engines have to read what they write; see `polyrl.sample.SamplingParams.stop`."""
MAX_FILES_BYTES: Final = 32 << 20
"""All small files together: a tokenizer of 256k entries is 20 MB, and the manifest has to fit one frame."""

FIRST_EPOCH: Final = 1
"""Epoch of a run that was started once."""
NO_TENSOR: Final = "__metadata__"
"""What safetensors calls something else than a tensor."""
DTYPE_BYTES: Final = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
"""safetensors' names of dtypes and their sizes."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: `size` bytes of the stream from `offset`, row-major, little-endian."""

    name: str
    dtype: str
    """A key of DTYPE_BYTES."""
    shape: tuple[int, ...]
    offset: int
    size: int
    checksum: bytes


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the stream; pieces follow each other without gaps."""

    hash: bytes
    size: int


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """A small file of the Hugging Face folder: config.json, generation_config.json, the tokenizer's."""

    name: str
    content: bytes
    hash: bytes


class VersionManifest(msgspec.Struct, frozen=True, array_like=True):
    """Everything about a version but its bytes."""

    version: int
    base: int | None
    """Version that a delta applies to; None of an anchor."""
    kind: Literal["anchor", "delta"]
    tensors: tuple[TensorEntry, ...]
    """Tensors of the version, however it travels."""
    chunks: tuple[ChunkEntry, ...]
    """Chunks of what travels: the tensors themselves, or the delta."""
    files: tuple[FileEntry, ...]
    """Small files; empty of a delta: it has those of its base."""
    base_hash: bytes = b""
    """`manifest_hash` of the base."""
    run_epoch: int = FIRST_EPOCH
    """The start of the run that it was made in."""

    @property
    def total_bytes(self) -> int:
        """Bytes of what travels, without the manifest."""
        return sum(chunk.size for chunk in self.chunks)

    @property
    def stream_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensors[-1].offset + self.tensors[-1].size if self.tensors else 0


class WeightsRef(msgspec.Struct, frozen=True, array_like=True):
    """A published version and where to pull it."""

    version: int = -1
    """-1: nothing was published."""
    endpoint: str = ""
    public_key: str = ""
    """CURVE server key of the endpoint, Z85."""
    manifest_hash: bytes = b""
    content: bytes = b""
    """`weights_hash` of it; empty: not known."""
    vocabulary: int = 0
    """The model's number of tokens: every id that it generates is below; 0: not known."""
    receipt: bytes = b""
    """`receipt_of` its stream, which engines do not learn here: who names it has pulled it; empty: not known."""
    positions: int = 0
    """Tokens that the model's own configuration allows in a context; 0: not known."""
    others: tuple[str, ...] = ()
    """Endpoints of the learner's further machines, each of which has its share of the chunks (`weights.shares`)."""


_decoder = msgspec.msgpack.Decoder(VersionManifest)


def digest(data: Buffer) -> bytes:
    """What names these bytes; bytes[HASH_BYTES]."""
    return blake3.blake3(data).digest(HASH_BYTES)


def tensor_checksum(data: Buffer) -> bytes:
    """What tells that these bytes are as they were; bytes[HASH_BYTES]."""
    return xxhash.xxh3_128_digest(data)


def receipt_of(stream: Buffer) -> bytes:
    """Shows that its maker held all tensors of a version: a hash over bytes of them that nothing in a manifest tells;
    bytes[HASH_BYTES].

    Whoever has pulled may tell others, and need not load what he has."""
    return receipt_of_sample(receipt_sample(stream))


def receipt_sample(part: Buffer, begin: int = 0) -> bytes:
    """What a receipt takes of a part of the stream, which begins there."""
    return np.frombuffer(part, np.uint8)[-begin % RECEIPT_STRIDE :: RECEIPT_STRIDE].tobytes()


def receipt_of_sample(sample: bytes) -> bytes:
    """`receipt_of` the stream, by what it takes of all its parts."""
    return blake3.blake3(sample, derive_key_context=RECEIPT_CONTEXT).digest(HASH_BYTES)


class StreamCheck:
    """Checks a version's tensors in its assembled stream, and gathers what its receipt is of while their bytes are at
    hand: to read them again costs a fifth of the check. Several threads may check, each its own tensors."""

    def __init__(self, stream: memoryview) -> None:
        """`stream` is uint8[stream_bytes]."""
        self._stream = np.frombuffer(stream, np.uint8)
        self._sample = np.zeros(-(-len(self._stream) // RECEIPT_STRIDE), np.uint8)

    def matches(self, tensor: TensorEntry) -> bool:
        """True when the tensor's bytes have its checksum."""
        hashed, end = xxhash.xxh3_128(), tensor.offset + tensor.size
        for begin in range(tensor.offset, end, CHECKED_AT_ONCE):
            piece = self._stream[begin : min(end, begin + CHECKED_AT_ONCE)]
            hashed.update(piece.data)
            place = -(-begin // RECEIPT_STRIDE)
            sampled = piece[place * RECEIPT_STRIDE - begin :: RECEIPT_STRIDE]
            self._sample[place : place + len(sampled)] = sampled
        return hashed.digest() == tensor.checksum

    def receipt(self) -> bytes:
        """`receipt_of` the stream, once all of its tensors have been checked; bytes[HASH_BYTES]."""
        return receipt_of_sample(self._sample.tobytes())


def weights_hash(tensors: Iterable[TensorEntry], files: Iterable[FileEntry]) -> bytes:
    """The same for two versions of the same weights and files, however they travel."""
    return digest(msgspec.msgpack.encode((tuple(tensors), tuple(files))))


def tensor_entry(name: str, dtype: str, shape: tuple[int, ...], offset: int, data: Buffer) -> TensorEntry:
    """The entry of a tensor whose raw bytes are `data`."""
    return TensorEntry(
        name, dtype, shape=shape, offset=offset, size=memoryview(data).nbytes, checksum=tensor_checksum(data)
    )


def file_entry(name: str, content: bytes) -> FileEntry:
    """The entry of a small file."""
    return FileEntry(name, content, hash=digest(content))


Each: TypeAlias = Callable[[Callable[[Buffer], "ChunkEntry"], Iterable[Buffer]], Iterable["ChunkEntry"]]
"""`map`, or one that works on several at once."""


def cut_chunks(stream: Buffer, chunk_bytes: int = CHUNK_BYTES, each: Each = map) -> tuple[ChunkEntry, ...]:
    """The chunks of a stream, the last one shorter."""
    return tuple(each(chunk_entry, pieces(stream, chunk_bytes)))


def pieces(stream: Buffer, size: int) -> Iterator[memoryview]:
    """The stream in pieces of `size` bytes, the last one shorter."""
    view = memoryview(stream).cast("B")
    return (view[begin : begin + size] for begin in range(0, len(view), size))


def chunk_entry(data: Buffer) -> ChunkEntry:
    """The entry of a chunk of these bytes."""
    return ChunkEntry(digest(data), memoryview(data).nbytes)


def chunk_places(manifest: VersionManifest) -> dict[bytes, list[tuple[int, int]]]:
    """Where each chunk hash belongs: (offset in the stream, size), several when its content repeats."""
    places: dict[bytes, list[tuple[int, int]]] = {}
    offset = 0
    for chunk in manifest.chunks:
        places.setdefault(chunk.hash, []).append((offset, chunk.size))
        offset += chunk.size
    return places


def missing_chunks(manifest: VersionManifest, have: Iterable[bytes]) -> list[ChunkEntry]:
    """Chunks to be pulled, each hash once, in stream order."""
    held = set(have)
    missing: dict[bytes, ChunkEntry] = {}
    for chunk in manifest.chunks:
        if chunk.hash not in held:
            missing.setdefault(chunk.hash, chunk)
    return list(missing.values())


def encode_manifest(manifest: VersionManifest) -> bytes:
    """The manifest's bytes; equal manifests have equal bytes.

    The last field is left out where it says nothing: receivers of a release that does not know it name the manifest by
    what they encode themselves, and look for the next delta's base by that name."""
    fields = msgspec.structs.astuple(manifest)
    return msgspec.msgpack.encode(fields[:-1] if manifest.run_epoch == FIRST_EPOCH else fields)


def manifest_hash(body: bytes) -> bytes:
    """The name of a manifest: the hash of its bytes."""
    return digest(body)


def decode_manifest(body: bytes, expected_hash: bytes, *, run_epoch: int) -> VersionManifest:
    """The manifest in `body`. Raises ProtocolError when it is of another start of the run, and else naming the first
    claim about sizes or places that cannot hold."""
    if manifest_hash(body) != expected_hash:
        raise ProtocolError("the manifest is not the announced one: its hash differs")
    try:
        manifest = _decoder.decode(body)
    except UNDECODABLE as error:
        raise ProtocolError(f"the manifest cannot be read: {error}") from None
    if manifest.run_epoch != run_epoch:
        made = f"version {manifest.version} was made in start {manifest.run_epoch} of the run"
        raise ProtocolError(f"{made}, and this is start {run_epoch}")
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: VersionManifest) -> None:
    """Raises ProtocolError when tensors do not tile the stream exactly, a delta has no base or is larger than what it
    makes can need, or a size, dtype or name is impossible."""
    end = _check_tensors(manifest.tensors)
    if manifest.version < 0:
        raise ProtocolError(f"version {manifest.version} is none")
    if len(set(manifest.chunks)) != len({chunk.hash for chunk in manifest.chunks}):
        raise ProtocolError("two chunks have one hash and two sizes")
    for chunk in manifest.chunks:
        if not 0 < chunk.size <= MAX_CHUNK_BYTES or len(chunk.hash) != HASH_BYTES:
            raise ProtocolError(f"a chunk of {chunk.size} bytes, or its hash, is of an impossible size")
    if manifest.kind == "delta":
        _check_delta(manifest)
    elif end != manifest.total_bytes or manifest.base is not None:
        raise ProtocolError(f"tensors end at byte {end}, chunks at byte {manifest.total_bytes}, of an anchor")
    _check_files(manifest.files)


def _check_delta(manifest: VersionManifest) -> None:
    if manifest.base is None or len(manifest.base_hash) != HASH_BYTES or not 0 <= manifest.base < manifest.version:
        raise ProtocolError(f"version {manifest.version} is a delta without a base that can be")
    if manifest.total_bytes > manifest.stream_bytes:
        raise ProtocolError(
            f"a delta of {manifest.total_bytes} bytes is larger than {manifest.stream_bytes} of tensors"
        )
    if manifest.files:
        raise ProtocolError("a delta brings no files: it has those of its base")


def same_layout(one: Iterable[TensorEntry], other: Iterable[TensorEntry]) -> bool:
    """Whether both have the same tensors at the same places, whatever their bytes."""
    blank = [[msgspec.structs.replace(tensor, checksum=b"") for tensor in tensors] for tensors in (one, other)]
    return blank[0] == blank[1]


def _check_tensors(tensors: tuple[TensorEntry, ...]) -> int:
    end = 0
    for tensor in tensors:
        width = DTYPE_BYTES.get(tensor.dtype)
        if tensor.name == NO_TENSOR:
            raise ProtocolError(f"a tensor may not be called {NO_TENSOR}")
        if width is None or min(tensor.shape, default=0) < 0:
            raise ProtocolError(f"tensor {tensor.name} has dtype {tensor.dtype} and shape {tensor.shape}")
        if tensor.offset != end or tensor.size != prod(tensor.shape) * width:
            raise ProtocolError(f"tensor {tensor.name} has an impossible place or size")
        end += tensor.size
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ProtocolError("two tensors have one name")
    return end


def _check_files(files: tuple[FileEntry, ...]) -> None:
    if len(files) > MAX_FILES or sum(len(file.content) for file in files) > MAX_FILES_BYTES:
        raise ProtocolError(f"more than {MAX_FILES} files or {MAX_FILES_BYTES} bytes of files")
    if len({file.name for file in files}) != len(files):
        raise ProtocolError("two files have one name")
    for file in files:
        if not _is_plain_name(file.name) or file.name.endswith(".safetensors"):
            raise ProtocolError(f"a file may not be called {file.name!r}")
        if digest(file.content) != file.hash:
            raise ProtocolError(f"file {file.name} has another hash than the manifest says")


def _is_plain_name(name: str) -> bool:
    return 0 < len(name) <= 128 and not name.startswith(".") and not set(name) & set("/\\\0")
