"""Anchor or delta, decided for each version by what was measured; and which versions stay.

One form of a version is made, and each engine takes what it lacks of the chain: one that has the base a delta, one
that is further behind several, one that joins the newest anchor and all deltas on it. So a delta is worth what it saves
those that have the base, less what it costs to make and apply, less what it adds to the way of those that join.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ANCHOR_EVERY: Final = 16
"""Versions from one anchor to the next at most: a joiner asks for as many manifests."""
CHAIN_SHARE: Final = 0.5
"""Share of an anchor's bytes that its deltas may have together: so much longer a joiner's way may become."""
SMALLEST: Final = 8 << 20
"""Bytes of tensors below which a version travels in a moment, whatever its form."""
APPLY_SPEED: Final = 4e9
"""Bytes of tensors per second that a receiver copies, changes and verifies; it overlaps with nothing."""
USUAL_BANDWIDTH: Final = 1.25e9
"""Until something was sent: 10 Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """What is known of a version that is to be published. Bytes, and bytes of tensors per second."""

    stream_bytes: int
    chain: tuple[int, ...] | None
    """Bytes of each delta since the newest anchor; None where there is none that it could rest on."""
    delta_bytes: int = 0
    """Estimated from a few parts."""
    density: float = 1.0
    """Share of 16-bit words that changed, of the same parts."""
    encode_speed: float = 1.0
    hash_speed: float = 1.0
    bandwidth: float = USUAL_BANDWIDTH
    stale: int = 1
    """Engines that took the version before."""
    joiners: int = 0
    """Engines that took an anchor since then."""
    anchor_share: float = 1.0
    """Copies of an anchor that left the publisher for each engine that took it, as was measured of the last one: less
    than one where engines give each other chunks, or share a machine."""
    delta_share: float = 1.0
    """The same of a delta: of a small one each engine takes all from the publisher."""


@dataclass(frozen=True)
class VersionPlan:
    """The form, and one sentence why."""

    is_delta: bool
    reason: str


def plan_version(facts: VersionFacts, smallest: int = SMALLEST, chosen: bool | None = None) -> VersionPlan:
    """A delta where it brings the version to all engines sooner, within the bounds that a joiner needs. `chosen`:
    whether deltas are made whatever is sooner, within these bounds; None: that is not said."""
    megabytes = f"{facts.delta_bytes / 1e6:.1f} of {facts.stream_bytes / 1e6:.1f} MB, {facts.density:.2%} of words"
    if facts.chain is None:
        return VersionPlan(False, "anchor: there is no version of this layout that it could rest on")
    if chosen is False:
        return VersionPlan(False, "anchor: the job wants every version whole")
    if facts.stream_bytes < smallest and not chosen:
        return VersionPlan(False, f"anchor: {facts.stream_bytes / 1e6:.1f} MB are small")
    if len(facts.chain) + 1 >= ANCHOR_EVERY:
        return VersionPlan(False, f"anchor: {len(facts.chain)} deltas since the last one")
    together = sum(facts.chain) + facts.delta_bytes
    if together > CHAIN_SHARE * facts.stream_bytes:
        return VersionPlan(False, f"anchor: {together / 1e6:.1f} MB of deltas would be as long a way ({megabytes})")
    if chosen:
        return VersionPlan(True, f"delta: the job wants them ({megabytes})")
    anchor_s, delta_s = _anchor_seconds(facts), _delta_seconds(facts)
    form, share = ("delta", facts.delta_share) if delta_s < anchor_s else ("anchor", facts.anchor_share)
    figures = f"{megabytes}; delta {delta_s:.3g} s, anchor {anchor_s:.3g} s"
    copies = f"{_copies(share, facts.stale + facts.joiners):.3g} copies"
    reason = f"{form}: {figures}, {facts.stale} engines behind, {facts.joiners} joining, {copies}"
    return VersionPlan(form == "delta", reason)


def _copies(share: float, receivers: int) -> float:
    """Copies that leave the publisher: one at least, where anybody takes it."""
    return max(min(1, receivers), share * receivers)


def _anchor_seconds(facts: VersionFacts) -> float:
    copies = _copies(facts.anchor_share, facts.stale + facts.joiners)
    return facts.stream_bytes / facts.hash_speed + copies * facts.stream_bytes / facts.bandwidth


def _delta_seconds(facts: VersionFacts) -> float:
    """Joiners take the anchor and the chain besides."""
    assert facts.chain is not None
    joined = _copies(facts.anchor_share, facts.joiners) * facts.stream_bytes
    joined += _copies(facts.delta_share, facts.joiners) * sum(facts.chain)
    sent = _copies(facts.delta_share, facts.stale + facts.joiners) * facts.delta_bytes + joined
    return facts.stream_bytes / facts.encode_speed + sent / facts.bandwidth + facts.stream_bytes / APPLY_SPEED


def chain_of(version: int, bases: Mapping[int, int | None]) -> list[int]:
    """The version and what it rests on, newest first. `bases`: of each version that is there; None of an anchor."""
    chain = [version]
    while (base := bases[chain[-1]]) is not None:
        chain.append(base)
    return chain


def versions_kept(bases: Mapping[int, int | None], sizes: Mapping[int, int], keep: int, max_bytes: int) -> set[int]:
    """The newest `keep` versions, as far back as they and what they rest on have `max_bytes` together; the newest stays
    in any case."""
    kept = set[int]()
    for version in sorted(bases, reverse=True)[:keep]:
        more = kept | set(chain_of(version, bases))
        if kept and sum(sizes[one] for one in more) > max_bytes:
            break
        kept = more
    return kept
