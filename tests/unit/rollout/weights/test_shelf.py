"""What an agent says that it has, of versions of many chunks too."""

from __future__ import annotations

from itertools import count

import pytest

from polyrl.weights import ChunkEntry, VersionManifest, encode_manifest, manifest_hash
from polyrl.wire import GetHeld
from polyrl_rollout.weights.peers.shelf import LISTED, Shelf

CHUNK = ChunkEntry(bytes(16), 9)


class Arriving:
    """What has come; each look at it takes as long as the test says."""

    def __init__(self) -> None:
        self.have = {CHUNK.hash}

    def read(self, chunk: ChunkEntry) -> bytearray | None:
        return bytearray(chunk.size)


@pytest.mark.parametrize(("takes", "is_new"), [(0.0004, True), (0.004, False)], ids=["few chunks", "very many"])
def test_an_inventory_that_costs_much_is_given_for_a_while(
    monkeypatch: pytest.MonkeyPatch, takes: float, is_new: bool
) -> None:
    """Each of twelve agents asked ten times a second: of 35,000 chunks half a core made nothing else."""
    ticks = count()
    monkeypatch.setattr("polyrl_rollout.weights.peers.shelf.time.monotonic", lambda: next(ticks) * takes)
    shelf, arriving = Shelf(), Arriving()
    manifest = VersionManifest(0, None, kind="anchor", tensors=(), chunks=(CHUNK,), files=())
    shelf.arrives(manifest, arriving, set())

    def given() -> bytes:
        found = shelf.find(GetHeld(manifest_hash(encode_manifest(manifest))))
        assert found is not None
        return bytes(found.data)

    before = given()
    arriving.have.clear()
    assert (given() != before) is is_new
    for _ in range(LISTED):
        later = given()
    assert later != before
