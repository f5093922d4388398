"""Random fault schedules through the production ledger in virtual time; POLYRL_SCHEDULES says how many."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from polyrl.ledger.causes import MoveCause
from polyrl_rollout.testing.simulation import draw_schedule, run_schedule, shrink

COUNT = int(os.environ.get("POLYRL_SCHEDULES", "240"))
SLICES = 8

TELLING_SEEDS = (55, 24, 13, 14)
"""The rarest ways were in these, which are therefore the first to be drawn."""

ENDS_DIFFERENTLY_BY_A_SET_OF_NAMES = 3005034
"""Two engines of equal cost knew a sample's siblings, and the one whose name came first in a set got it."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(SLICES))
def test_every_invariant_holds_under_random_faults(part: int, seed: int) -> None:
    for number in range(seed + part, seed + COUNT, SLICES):
        smallest, broken = shrink(draw_schedule(number))
        assert broken is None, (
            f"python -m polyrl_rollout.testing.simulation {number}: {broken}; faults: {smallest.faults}"
        )


BROKEN_ONCE = {
    463: "a sample was held for its prefix until a moment that was now already",
    721: "a restart amid what was asked for",
    2959732783: "a hand-over that nobody decided anew when an engine was quarantined",
    228: "what was trained before was handed out again in the same parts, and the audit called it short",
    5335: "an Assign met an engine that had greeted just before it came, and ran it beside all that it got next",
    3229295665: "a look was due a rounding error after now, by a clock that was set to just before it each time",
    1055292: "the time until a first token counted as a step of decoding, and a fast engine idled as if it were slow",
    1105194: "five frames of the only engine that fits were lost, and the checker did not wait for its pauses",
    1408271: "an engine that was frozen again before it was awake read a Cancel before the Assign that it meant",
    1408847: "a trainer took what was accepted just before it learned that the journal was lost for lost as well",
    1307944: "a turn waited for the far faster engine that had its prefix, longer than the checker thought it may",
    1325567: "the same, beside an engine that was measured as slow and had been idle since",
    5000367: "evaluations were taken for batches that are learned, by the checker",
    5002245: "all waited for the trainer to learn, which was sooner than an idle slow engine: the checker's error",
    5002250: "an engine that was given up while it was frozen woke by an order from before: the checker's error",
    5050406: "a slow engine had recovered while it was idle, which the checker knew and the ledger could not",
    6000222: "a window of a hundred short turns, whose messages took longer than their tokens: the audit counted none",
    3052334: "an engine woke while nobody was heard, and the checker counted from an order before: its error",
    3002947: "the trainer's engine slept on, for others were counted on that cannot hold what was left",
    3003121: "the same, for others that had left the versions behind that the rest may be of",
    1413528: "the manager was away, and its absence counted as the time that engines took for their tokens",
    3010951: "a sample waited until the trainer had learned for an engine that had refused it, beside an idle one",
    3064523: "an engine that greets in a flood took the answer to a greeting on its last connection for this one's",
    3018169: "an engine of the trainer's gave tokens again after a silence, for which a batch had been held: its error",
    7006047: "an engine that had become slow greeted anew, and the ledger's count began there: the checker's error",
    3019043: "a sample waited for the trainer to learn beside an engine that had been measured as slow: its error",
    13106424: "what was left could outgrow all engines but the trainer's, and counted as theirs: the checker's error",
    13130277: "what ran had no KV room on any engine but the trainer's, and counted as theirs: the checker's error",
    13136722: "a sample of a version that all awake engines had left behind waited for one that slept",
    3022262: "an engine whose greeting crossed an order to wake was taken for asleep, and the learner for alone",
}


@pytest.mark.parametrize("number", BROKEN_ONCE)
def test_what_once_broke_an_invariant_does_not_again(number: int) -> None:
    run_schedule(draw_schedule(number))


def test_a_seed_gives_the_same_run_every_time() -> None:
    first, second = (run_schedule(draw_schedule(7)) for _ in range(2))
    assert first == second


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    """Names hash differently in each process: an order that follows from a set of them is another one there."""
    program = (
        "from polyrl_rollout.testing.simulation import draw_schedule, run_schedule\n"
        f"run = run_schedule(draw_schedule({ENDS_DIFFERENTLY_BY_A_SET_OF_NAMES}))\n"
        "print(run.counters, run.virtual_s, run.events)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": salt},
            check=True,
            capture_output=True,
            timeout=120,
        ).stdout
        for salt in ("0", "1")
    ]
    assert runs[0] == runs[1]


def test_schedules_reach_every_way_an_assignment_can_end() -> None:
    missing = set(MoveCause)
    for seed in (*TELLING_SEEDS, *range(400)):
        missing -= run_schedule(draw_schedule(seed)).counters.migrations.keys()
        if not missing:
            return
    pytest.fail(f"no schedule ends an assignment by {missing}")
