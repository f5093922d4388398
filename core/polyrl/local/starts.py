"""What the failed starts of a role mean, as a table: tried again, and when, or given up, and why.

    how it ended before it served                  in a row                       then
    a reason of its own (an exit code, 0 too)      fewer than FAILED_STARTS_LIMIT  again, after the back-off
                                                   that many                       given up with that reason
    killed, out of memory, not ready in time       for less than RETRIES_S         again, after the back-off
                                                   for longer                      given up

One that ends with 0 ended by itself: whom the fleet asks to leave is no failed start. Whoever kills engines while they
start, or a machine too busy to start them in time, is no wrong setting. SGLang ends by a signal whatever went wrong,
hence the deadline.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polyrl.worker import FAILED_STARTS_LIMIT, TEMPORARY_EXIT

FIRST_RESTART_BACKOFF_S: Final = 1.0
"""Wait after an exit that was not requested; it doubles with each further failed start in a row."""

LONGEST_RESTART_BACKOFF_S: Final = 30.0
"""As long as a start itself takes on a busy machine; a longer wait would save nothing."""

RETRIES_S: Final = 1800.0
"""From the first to the last of the starts that were ended from outside: three that SGLang's own deadline of 600 s
ends, or the time in which whoever kills them is found."""

SHELL_SIGNALS: Final = range(129, 160)
"""Exit codes that a wrapper gives for a child that a signal ended: 128 and its number."""


@dataclass(frozen=True)
class FailedStart:
    """A worker that ended before it was of use."""

    name: str
    exit_code: int
    exited_at: float

    @property
    def from_outside(self) -> bool:
        """True when its end says nothing about its settings."""
        return was_killed(self.exit_code)

    def __str__(self) -> str:
        return f"{self.name} {how_it_ended(self.exit_code)}"


@dataclass(frozen=True)
class StartVerdict:
    """What becomes of a role after its failed starts."""

    again_at: float | None
    """When another may start; None: given up."""
    why: str
    """What happened, as the end of a sentence."""
    from_outside: bool = False
    """The newest was killed or too slow."""


def was_killed(exit_code: int) -> bool:
    """True when a signal ended it, or its engine, or that was not ready in time."""
    return exit_code < 0 or exit_code in SHELL_SIGNALS or exit_code == TEMPORARY_EXIT


def how_it_ended(exit_code: int) -> str:
    """In words."""
    number = -exit_code if exit_code < 0 else exit_code - 128 if exit_code in SHELL_SIGNALS else 0
    if number in set(signal.Signals):
        return f"was killed ({signal.Signals(number).name})"
    if exit_code == TEMPORARY_EXIT:
        return "lost a process that it needs: killed, or not ready in time"
    return f"ended with exit code {exit_code}"


def judge(failures: Sequence[FailedStart]) -> StartVerdict | None:
    """Of the failed starts since one was of use, oldest first; None where there are none."""
    if not failures:
        return None
    own = [failed for failed in failures if not failed.from_outside]
    if len(own) >= FAILED_STARTS_LIMIT:
        return StartVerdict(
            None, f"{len(own)} ended before they served (newest {own[-1].name}, exit code {own[-1].exit_code})"
        )
    ends = [failed.exited_at for failed in failures if failed.from_outside]
    if ends and max(ends) - min(ends) >= RETRIES_S:
        why = f"{len(ends)} were killed or not ready in time, over {RETRIES_S / 60:.0f} min (newest: {failures[-1]})"
        return StartVerdict(None, why)
    again_at = max(failed.exited_at for failed in failures) + pause_after(len(failures))
    return StartVerdict(again_at, f"{failures[-1]} before it served", from_outside=failures[-1].from_outside)


def pause_after(failures: int) -> float:
    """After that many in a row, one or more."""
    doublings = min(failures - 1, math.ceil(math.log2(LONGEST_RESTART_BACKOFF_S)))  # of thousands none overflows
    return min(LONGEST_RESTART_BACKOFF_S, math.ldexp(FIRST_RESTART_BACKOFF_S, doublings))
