"""What travels of a version: the chunks of its tensors, or of a delta on the version before.

`polyrl.weights.planning` decides, by what is measured here. Each machine of the learner hashes or encodes its share;
what is gathered are hashes, and a delta.

The version before is needed whole for the next delta, so its image stays until then; an anchor's is served from.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from polyrl import weights
from polyrl.weights import FIRST_EPOCH, FileEntry, TensorEntry, VersionManifest
from polyrl.weights.planning import SMALLEST, VersionFacts, VersionPlan, chain_of, plan_version
from polyrl.weights.shares import chunk_machines
from polyrl_trainer.backends.weight_stream import stream_bytes
from polyrl_trainer.weights.machines import Machines
from polyrl_trainer.weights.share import SAMPLE_BYTES
from polyrl_trainer.weights.share_commands import EncodeChange, HashChunks, SampleChange

SAMPLES: Final = 16
"""Parts of a version, evenly, by which its density is known before all is encoded."""
USUAL_HASH_SPEED: Final = 3e9


@dataclass(eq=False)
class WeightsCopy:
    """The tensors of a version as they were when it was made."""

    number: int
    """Number of the copy; each machine has a share of it."""
    tensors: list[TensorEntry]
    """Without their checksums until somebody asks for them."""
    files: dict[str, bytes]
    receipt: bytes = b""
    """Empty until somebody asks for it."""


@dataclass(frozen=True, eq=False)
class VersionForm:
    """A version, in the form in which it travels."""

    manifest: VersionManifest
    body: bytes
    """The manifest, encoded."""
    copy: WeightsCopy
    """Its tensors: of an anchor for as long as it is kept, of a delta until the next version rests on it."""
    chunks: Sequence[bytes]
    """Chunks of a delta."""
    machines: Mapping[bytes, int]
    """Which machine gives the chunk of that content hash; the others ask it."""
    plan: VersionPlan
    facts: VersionFacts

    @property
    def own_bytes(self) -> int:
        """Bytes of chunks that are the first machine's, each once."""
        sizes = {chunk.hash: chunk.size for chunk in self.manifest.chunks}
        return sum(size for hash_, size in sizes.items() if not self.machines[hash_])

    @property
    def measures(self) -> dict[str, float]:
        """For the step's metrics."""
        chain = (self.facts.chain or ()) if self.plan.is_delta else ()
        return {
            "weights/bytes": float(self.manifest.total_bytes),
            "weights/bytes_share": self.manifest.total_bytes / max(1, self.manifest.stream_bytes),
            "weights/changed_share": self.facts.density,
            "weights/deltas_since_anchor": float(len(chain) + self.plan.is_delta),
        }


@dataclass(eq=False)
class Taken:
    """What receivers took since the newest version was published, by version."""

    manifests: Counter[int] = field(default_factory=Counter)
    bytes: Counter[int] = field(default_factory=Counter)
    """Bytes of chunks of the first machine's share, to all receivers: the other machines give as much of theirs."""


class FormMaker:
    """Makes one form after the other, each on the one before where that is worth it."""

    def __init__(
        self, machines: Machines, chunk_bytes: int, deltas: bool | None = None, run_epoch: int = FIRST_EPOCH
    ) -> None:
        """`deltas`: see `plan_version`. `run_epoch`: of all that are made."""
        self._machines, self._chunk_bytes, self._deltas, self.smallest = machines, chunk_bytes, deltas, SMALLEST
        self._run_epoch = run_epoch
        self._hash_speed = USUAL_HASH_SPEED
        self._shares: dict[str, float] = {}
        """Copies sent for each engine that took a version, by the version's kind."""

    def note_copies(self, kept: Mapping[int, VersionForm], taken: Taken) -> None:
        """Learns from what was taken, once nobody takes any of it. Who asked and has taken less than one copy, all of
        them together, has not begun."""
        for number, engines in sorted(taken.manifests.items()):
            whole = kept[number].own_bytes if number in kept else 0
            if taken.bytes[number] >= whole > 0:
                self._shares[kept[number].manifest.kind] = min(1.0, taken.bytes[number] / whole / engines)

    def make(
        self, version: int, copied: WeightsCopy, kept: Mapping[int, VersionForm], asked: Counter[int], bandwidth: float
    ) -> VersionForm:
        """A delta would rest on the newest of `kept`. `asked`: manifests since then; `bandwidth`: to all receivers."""
        base = _base_for(version, copied, kept)
        facts = self._facts(copied, base, kept, asked, bandwidth)
        plan = plan_version(facts, self.smallest, self._deltas)
        if plan.is_delta and base is not None:
            encoded = self._machines.all(EncodeChange(copied.number, base.copy.number))
            delta = b"".join(one.parts for one in encoded)
            facts = replace(facts, delta_bytes=len(delta))
            plan = plan_version(facts, self.smallest, self._deltas)
            if plan.is_delta:
                manifest = VersionManifest(
                    version,
                    base.manifest.version,
                    kind="delta",
                    tensors=tuple(copied.tensors),
                    chunks=weights.cut_chunks(delta, self._chunk_bytes, self._machines.own.each),
                    files=(),
                    base_hash=weights.manifest_hash(base.body),
                    run_epoch=self._run_epoch,
                )
                chunks = [bytes(piece) for piece in weights.pieces(delta, self._chunk_bytes)]
                return self._form(manifest, copied, chunks, plan, facts)
        return self._anchor(version, copied, plan, facts)

    def _anchor(self, version: int, copied: WeightsCopy, plan: VersionPlan, facts: VersionFacts) -> VersionForm:
        begun = time.monotonic()
        cut = self._machines.all(HashChunks(copied.number, self._chunk_bytes))
        manifest = VersionManifest(
            version,
            None,
            kind="anchor",
            tensors=tuple(copied.tensors),
            chunks=tuple(chunk for one in cut for chunk in one.chunks),
            files=file_entries(copied.files),
            run_epoch=self._run_epoch,
        )
        self._hash_speed = _speed(manifest.stream_bytes, begun)
        return self._form(manifest, copied, (), plan, facts)

    def _form(
        self,
        manifest: VersionManifest,
        copied: WeightsCopy,
        chunks: Sequence[bytes],
        plan: VersionPlan,
        facts: VersionFacts,
    ) -> VersionForm:
        owners = zip(manifest.chunks, chunk_machines(manifest, self._machines.number), strict=True)
        machines = {chunk.hash: machine for chunk, machine in reversed(list(owners))}  # as receivers have it
        body = weights.encode_manifest(manifest)
        return VersionForm(manifest, body, copy=copied, chunks=chunks, machines=machines, plan=plan, facts=facts)

    def _facts(
        self,
        copied: WeightsCopy,
        base: VersionForm | None,
        kept: Mapping[int, VersionForm],
        asked: Counter[int],
        bandwidth: float,
    ) -> VersionFacts:
        size = stream_bytes(copied.tensors)
        if not size or base is None or self._deltas is False or (size < self.smallest and not self._deltas):
            return VersionFacts(stream_bytes=size, chain=None if base is None or not size else ())
        bases = {number: form.manifest.base for number, form in kept.items()}
        *deltas, anchor = chain_of(base.manifest.version, bases)
        joined = asked[anchor] if deltas else 0
        sampled = self._sample(base.copy, copied, size)
        anchor_share = self._shares.get("anchor", 1.0)
        return VersionFacts(
            stream_bytes=size,
            chain=tuple(kept[number].manifest.total_bytes for number in deltas),
            delta_bytes=sampled.bytes * size // sampled.of,
            density=sampled.changed * 2 / sampled.of,
            encode_speed=sampled.speed,
            hash_speed=self._hash_speed,
            bandwidth=bandwidth,
            stale=max(1, asked[base.manifest.version] - joined),
            joiners=joined,
            anchor_share=anchor_share,
            delta_share=self._shares.get("delta", anchor_share),
        )

    def _sample(self, base: WeightsCopy, copied: WeightsCopy, size: int) -> _Sampled:
        every, begun = max(1, size // SAMPLE_BYTES // SAMPLES) * SAMPLE_BYTES, time.monotonic()
        found = self._machines.all(SampleChange(copied.number, base.number, every=every))
        sizes = sum(one.of for one in found)
        return _Sampled(
            sum(one.bytes for one in found),
            sizes,
            changed=sum(one.changed for one in found),
            speed=_speed(sizes, begun),
        )


@dataclass(frozen=True)
class _Sampled:
    bytes: int
    of: int
    changed: int
    """Words."""
    speed: float


def _base_for(version: int, copied: WeightsCopy, kept: Mapping[int, VersionForm]) -> VersionForm | None:
    """The newest version, if a delta may rest on it."""
    newest = kept.get(max(kept, default=-1))
    if newest is None or newest.manifest.version >= version or newest.copy.files != copied.files:
        return None
    return newest if weights.same_layout(newest.manifest.tensors, copied.tensors) else None


def file_entries(files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """Entries of the small files, by name."""
    return tuple(weights.file_entry(name, content) for name, content in sorted(files.items()))


def _speed(size: int, begun: float) -> float:
    return size / max(time.monotonic() - begun, 1e-9)
