"""What travels of a version: the chunks of its tensors, or of a delta on the version before.

`polyrl.weights.planning` decides, by what is measured here.

The version before is needed whole for the next delta, so its image stays until then; an anchor's is served from.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from polyrl import weights
from polyrl.weights import FIRST_EPOCH, FileEntry, TensorEntry, VersionManifest
from polyrl.weights.deltas import EachOf, encode_delta, encode_part, num_changed
from polyrl.weights.planning import SMALLEST, VersionFacts, VersionPlan, chain_of, plan_version
from polyrl_trainer.weights.images import Image

SAMPLES: Final = 16
SAMPLE_BYTES: Final = 256 << 10
"""Of a version, evenly, by which its density is known before all is encoded."""
USUAL_HASH_SPEED: Final = 3e9


@dataclass(eq=False)
class WeightsCopy:
    """The tensors of a version as they were when it was made."""

    image: Image
    tensors: list[TensorEntry]
    """Without their checksums until somebody asks for them."""
    files: dict[str, bytes]


@dataclass(frozen=True, eq=False)
class VersionForm:
    """A version, in the form in which it travels."""

    manifest: VersionManifest
    body: bytes
    """Of the manifest."""
    image: Image
    """Its tensors: of an anchor for as long as it is kept, of a delta until the next version rests on it."""
    chunks: Mapping[bytes, memoryview]
    """By content hash."""
    files: dict[str, bytes]
    plan: VersionPlan
    facts: VersionFacts

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
    """Of chunks, to all of them."""


class FormMaker:
    """Makes one form after the other, each on the one before where that is worth it."""

    def __init__(
        self, each: EachOf, chunk_bytes: int, deltas: bool | None = None, run_epoch: int = FIRST_EPOCH
    ) -> None:
        """`each` works on all cores. `deltas`: see `plan_version`. `run_epoch`: of all that are made."""
        self._each, self._chunk_bytes, self._deltas, self.smallest = each, chunk_bytes, deltas, SMALLEST
        self._run_epoch = run_epoch
        self._hash_speed = USUAL_HASH_SPEED
        self._shares: dict[str, float] = {}
        """Copies sent for each engine that took a version, by the version's kind."""

    def note_copies(self, kept: Mapping[int, VersionForm], taken: Taken) -> None:
        """Learns from what was taken, once nobody takes any of it. Who asked and has taken less than one copy, all of
        them together, has not begun."""
        for number, engines in sorted(taken.manifests.items()):
            manifest = kept[number].manifest if number in kept else None
            if manifest is not None and taken.bytes[number] >= manifest.total_bytes > 0:
                self._shares[manifest.kind] = min(1.0, taken.bytes[number] / manifest.total_bytes / engines)

    def make(
        self, version: int, copied: WeightsCopy, kept: Mapping[int, VersionForm], asked: Counter[int], bandwidth: float
    ) -> VersionForm:
        """A delta would rest on the newest of `kept`. `asked`: manifests since then; `bandwidth`: to all receivers."""
        base = _base_for(version, copied, kept)
        facts = self._facts(copied, base, kept, asked, bandwidth)
        plan = plan_version(facts, self.smallest, self._deltas)
        if plan.is_delta and base is not None:
            delta = b"".join(encode_delta(base.image.data, copied.image.data, self._each))
            facts = replace(facts, delta_bytes=len(delta))
            plan = plan_version(facts, self.smallest, self._deltas)
            if plan.is_delta:
                manifest = VersionManifest(
                    version,
                    base.manifest.version,
                    kind="delta",
                    tensors=tuple(copied.tensors),
                    chunks=weights.cut_chunks(delta, self._chunk_bytes, self._each),
                    files=(),
                    base_hash=weights.manifest_hash(base.body),
                    run_epoch=self._run_epoch,
                )
                return self._form(manifest, copied, memoryview(delta), plan, facts)
        return self._anchor(version, copied, plan, facts)

    def _anchor(self, version: int, copied: WeightsCopy, plan: VersionPlan, facts: VersionFacts) -> VersionForm:
        begun, data = time.monotonic(), copied.image.data
        manifest = VersionManifest(
            version,
            None,
            kind="anchor",
            tensors=tuple(copied.tensors),
            chunks=weights.cut_chunks(data, self._chunk_bytes, self._each),
            files=file_entries(copied.files),
            run_epoch=self._run_epoch,
        )
        self._hash_speed = _speed(len(data), begun)
        return self._form(manifest, copied, data, plan, facts)

    def _form(
        self, manifest: VersionManifest, copied: WeightsCopy, data: memoryview, plan: VersionPlan, facts: VersionFacts
    ) -> VersionForm:
        pieces = weights.pieces(data, self._chunk_bytes)
        chunks = {chunk.hash: piece for chunk, piece in zip(manifest.chunks, pieces, strict=True)}
        body = weights.encode_manifest(manifest)
        return VersionForm(
            manifest, body, image=copied.image, chunks=chunks, files=copied.files, plan=plan, facts=facts
        )

    def _facts(
        self,
        copied: WeightsCopy,
        base: VersionForm | None,
        kept: Mapping[int, VersionForm],
        asked: Counter[int],
        bandwidth: float,
    ) -> VersionFacts:
        size = len(copied.image.data)
        if not size or base is None or self._deltas is False or (size < self.smallest and not self._deltas):
            return VersionFacts(stream_bytes=size, chain=None if base is None or not size else ())
        bases = {number: form.manifest.base for number, form in kept.items()}
        *deltas, anchor = chain_of(base.manifest.version, bases)
        joined = asked[anchor] if deltas else 0
        sampled = self._sample(base.image.data, copied.image.data)
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

    def _sample(self, old: memoryview, new: memoryview) -> _Sampled:
        begins = range(0, len(new), max(1, len(new) // SAMPLE_BYTES // SAMPLES) * SAMPLE_BYTES)
        begun = time.monotonic()
        olds, news = ([data[at : at + SAMPLE_BYTES] for at in begins] for data in (old, new))
        parts, sizes = list(self._each(encode_part, olds, news)), [len(one) for one in news]
        speed = _speed(sum(sizes), begun)
        changed = sum(num_changed(part, size) for part, size in zip(parts, sizes, strict=True))
        return _Sampled(sum(map(len, parts)), sum(sizes), changed=changed, speed=speed)


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
    if newest is None or newest.manifest.version >= version or newest.files != copied.files:
        return None
    return newest if weights.same_layout(newest.manifest.tensors, copied.tensors) else None


def file_entries(files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """Of the small files, by name."""
    return tuple(weights.file_entry(name, content) for name, content in sorted(files.items()))


def _speed(size: int, begun: float) -> float:
    return size / max(time.monotonic() - begun, 1e-9)
