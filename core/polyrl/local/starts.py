"""What the failed starts of a role mean, as a table: tried again, and when, or given up, and why.

    how it ended before it served                  in a row                       then
    a reason of its own (an exit code, 0 too)      fewer than FAILED_STARTS_LIMIT  again, after the back-off
                                                   that many                       given up with that reason
    killed, out of memory, not ready in time       for less than RETRIES_S         again, after the back-off
                                                   for longer                      given up
    in whatever way                                beside one that served          again, after the back-off

In a row are starts of which each began after another one had failed: of a fleet that starts together all may fail of
one cause, a port or a download, and have failed once. Where another one of the role serves, the setting is good.

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

LONGEST_START_S: Final = 900.0
"""SGLang's own deadline of 600 s, and the pull of its weights before. Who is killed later waited in good health for
weights that come late: supervised learning takes hours."""

SHELL_SIGNALS: Final = range(129, 160)
"""Exit codes that a wrapper gives for a child that a signal ended: 128 and its number."""


@dataclass(frozen=True)
class FailedStart:
    """A worker that ended before it was of use."""

    name: str
    exit_code: int
    started_at: float
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
    repeats: bool = False
    """So many failed for a reason of their own that only those that served speak for the role."""


def was_killed(exit_code: int) -> bool:
    """True when a signal ended it, or its engine, or that was not ready in time."""
    return exit_code < 0 or exit_code in SHELL_SIGNALS or exit_code == TEMPORARY_EXIT


def was_well(exit_code: int, lived_s: float) -> bool:
    """True when a signal ended one whose start had long been over; its engine had none to lose yet."""
    return was_killed(exit_code) and exit_code != TEMPORARY_EXIT and lived_s >= LONGEST_START_S


def how_it_ended(exit_code: int) -> str:
    """How a process ended, in words."""
    number = -exit_code if exit_code < 0 else exit_code - 128 if exit_code in SHELL_SIGNALS else 0
    if number in set(signal.Signals):
        return f"was killed ({signal.Signals(number).name})"
    if exit_code == TEMPORARY_EXIT:
        return "lost a process that it needs: killed, or not ready in time"
    return f"ended with exit code {exit_code}"


def judge(failures: Sequence[FailedStart], proven_until: float = -math.inf) -> StartVerdict | None:
    """Verdict on the failed starts since one was of use; None where there are none. `proven_until`: as long as another
    one of the role that was of use lived; infinite while one does."""
    if not failures:
        return None
    given_up = _reason_to_give_up([failed for failed in failures if failed.started_at >= proven_until])
    if given_up:
        return StartVerdict(None, given_up)
    again_at = max(failed.exited_at for failed in failures) + pause_after(in_a_row(failures))
    own = _own(failures)
    repeats = in_a_row(own) >= FAILED_STARTS_LIMIT
    why = _summary(own) if repeats else f"{failures[-1]} before it served"
    return StartVerdict(again_at, why, from_outside=failures[-1].from_outside, repeats=repeats)


def in_a_row(failures: Sequence[FailedStart]) -> int:
    """How many of them each began after the one before had failed."""
    count, failed_at = 0, -math.inf
    for failed in sorted(failures, key=lambda failed: failed.exited_at):
        if failed.started_at > failed_at:
            count, failed_at = count + 1, failed.exited_at
    return count


def _reason_to_give_up(failures: Sequence[FailedStart]) -> str:
    own = _own(failures)
    if in_a_row(own) >= FAILED_STARTS_LIMIT:
        return _summary(own)
    # One that lived so long waited in good health, for weights that came late: what failed before it is over.
    waited = [failed.started_at for failed in failures if failed.exited_at - failed.started_at >= RETRIES_S]
    since = max(waited, default=-math.inf)
    ends = [failed.exited_at for failed in failures if failed.from_outside and failed.started_at >= since]
    if ends and max(ends) - min(ends) >= RETRIES_S:
        return f"{len(ends)} were killed or not ready in time, over {RETRIES_S / 60:.0f} min (newest: {failures[-1]})"
    return ""


def _own(failures: Sequence[FailedStart]) -> list[FailedStart]:
    return [failed for failed in failures if not failed.from_outside]


def _summary(own: Sequence[FailedStart]) -> str:
    return f"{len(own)} ended before they served (newest {own[-1].name}, exit code {own[-1].exit_code})"


def pause_after(failures: int) -> float:
    """After that many in a row, one or more."""
    doublings = min(failures - 1, math.ceil(math.log2(LONGEST_RESTART_BACKOFF_S)))  # of thousands none overflows
    return min(LONGEST_RESTART_BACKOFF_S, math.ldexp(FIRST_RESTART_BACKOFF_S, doublings))
