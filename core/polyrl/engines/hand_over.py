"""Whether what the learner learns next needs its GPU alone, or fits beside the engine there: a plan, by measure.

    others    the most that other processes ever held of the GPU: the engine awake, and contexts
    peak      the most that the learner itself ever held
    alone     unless others + peak + MARGIN_SHARE of the GPU fit it

Before an engine was seen there and a pass was learned nothing is known, and the learner is alone. What sleeping and
waking cost is the manager's to weigh: it measures both, and wakes engines only for what gains more (`ledger`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polyrl.manifest.spec import ReservedSleep

MARGIN_SHARE: Final = 0.05
"""Share of the GPU left free: allocators do not use every hole, and the next batch may be longer than all before."""

LEAST_ENGINE_BYTES: Final = 2 << 30
"""Less in other processes is contexts of theirs and ours, and no engine that is awake: its keys and values alone take
a share of the GPU."""

GIB: Final = 1 << 30


@dataclass(frozen=True)
class DeviceUse:
    """One GPU at one moment, in bytes."""

    total: int
    free: int
    own: int
    """Held by this process."""
    own_peak: int
    """At most, ever; 0: it has learned nothing yet."""

    @property
    def others(self) -> int:
        """Held by other processes, and by drivers."""
        return max(0, self.total - self.free - self.own)


@dataclass(frozen=True)
class HandOverPlan:
    """How the learner's GPU is handed over for the next batch."""

    alone: bool
    """Engines on the GPU sleep before it comes."""
    why: str
    """A sentence."""


def plan_hand_over(sleep: ReservedSleep, use: DeviceUse | None, others: int = 0) -> HandOverPlan:
    """`use`: of the learner's GPU now, None without one; `others`: the most of `DeviceUse.others` that was seen."""
    if sleep is not ReservedSleep.AUTO:
        return HandOverPlan(sleep is ReservedSleep.ALWAYS, f"trainer.reservedSleep is {sleep.value}")
    if use is None:
        return HandOverPlan(False, "the learner has no GPU")
    if not use.own_peak or others < LEAST_ENGINE_BYTES:
        return HandOverPlan(True, "how much engine and learner need of their GPU was not measured yet")
    needed = others + use.own_peak + int(MARGIN_SHARE * use.total)
    parts = f"engine and contexts {_gib(others)}, the learner {_gib(use.own_peak)}, of {_gib(use.total)}"
    return HandOverPlan(needed > use.total, parts)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
