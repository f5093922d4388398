"""What a trainer does about saving, with the time that its grace leaves and what earlier saves took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SLACK: Final = 1.25
"""A save may take so many times what the slowest of the last ones took for as many bytes."""
MEASURED_SAVES: Final = 3
"""Saves whose speed counts: a shared disk is slow at times, and the first save of a process touches new memory."""
MIB: Final = 1 << 20


class SaveAction(StrEnum):
    """The next thing to do."""

    AWAIT = "await"
    """The save in flight: it is older, but the only one that is sure to come first."""
    BEGIN = "begin"
    """A save of the state as it is."""
    NOTHING = "nothing"
    """What is saved already is this very state."""
    LEAVE = "leave"
    """A save would not be over in time."""


@dataclass(frozen=True)
class SaveDecision:
    """An action and its reason, which is empty unless something stays unsaved."""

    action: SaveAction
    why: str = ""


@dataclass(frozen=True)
class MeasuredSave:
    """One that came to its end, from its begin until it was durable."""

    size: int
    """Bytes."""
    seconds: float


@dataclass(frozen=True)
class SavePace:
    """The last saves of this process, the newest last."""

    saves: Sequence[MeasuredSave] = ()

    def after(self, save: MeasuredSave) -> SavePace:
        """These saves and one more; only the newest are kept."""
        return SavePace((*self.saves, save)[-MEASURED_SAVES:])

    def seconds(self, size: int) -> float | None:
        """Seconds that so many bytes take at the slowest of these speeds; None before the first save."""
        return max((one.seconds / max(1, one.size) * size for one in self.saves), default=None)


def decide_save(
    left_s: float | None, size: int, pace: SavePace, *, in_flight: bool = False, unchanged: bool = False
) -> SaveDecision:
    """`left_s`: until the grace is over, None: nobody has asked to stop; `size`: bytes that a save would write;
    `unchanged`: the newest durable checkpoint holds this state. Where no save was measured, one is tried."""
    if in_flight:
        return SaveDecision(SaveAction.AWAIT)
    if unchanged:
        return SaveDecision(SaveAction.NOTHING)
    takes_s = pace.seconds(size)
    if left_s is None or takes_s is None or SLACK * takes_s <= left_s:
        return SaveDecision(SaveAction.BEGIN)
    why = f"a save of {size / MIB:.1f} MiB takes {takes_s:.1f} s, and {max(0.0, left_s):.1f} s were left"
    return SaveDecision(SaveAction.LEAVE, why)
