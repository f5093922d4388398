"""A delta on its way: its chunks in memory, each named by its hash, until it is applied."""

from __future__ import annotations

from polyrl.errors import ProtocolError
from polyrl.weights import ChunkEntry, TensorEntry, VersionManifest, chunk_places, digest


class DeltaBytes:
    """Takes chunks as `staging.Partial` does. Several threads may write, each its own chunks."""

    def __init__(self, manifest: VersionManifest) -> None:
        self.manifest = manifest
        self.data = memoryview(bytearray(manifest.total_bytes))
        self.have = set[bytes]()
        """Hashes of chunks that have come."""
        self._places = chunk_places(manifest)

    def place(self, chunk: ChunkEntry) -> memoryview:
        """Where a chunk is to be written."""
        offset, size = self._places[chunk.hash][0]
        return self.data[offset : offset + size]

    def read(self, chunk: ChunkEntry) -> bytearray | None:
        """A copy of a chunk that has come."""
        return bytearray(self.place(chunk)) if chunk.hash in self.have else None

    def take(self, chunk: ChunkEntry) -> list[TensorEntry]:
        """The chunk lies in its place, and is copied wherever else it belongs; no tensor is whole by it."""
        first = self.place(chunk)
        for offset, size in self._places[chunk.hash][1:]:
            self.data[offset : offset + size] = first
        self.have.add(chunk.hash)
        return []

    def verify_tensor(self, tensor: TensorEntry) -> None:
        """There are none before it is applied."""

    def verify(self) -> None:
        """Raises ProtocolError when a chunk is not what its name says."""
        if self._false():
            raise ProtocolError(f"a chunk of version {self.manifest.version}, a delta, is not what its hash says")

    def drop_false(self) -> int:
        """Forgets chunks that are others than their names say; how many."""
        false = self._false()
        self.have -= false
        return len(false)

    def _false(self) -> set[bytes]:
        return {hash_ for hash_ in self.have if digest(self.data[slice(*self._ends(hash_))]) != hash_}

    def _ends(self, hash_: bytes) -> tuple[int, int]:
        offset, size = self._places[hash_][0]
        return offset, offset + size
