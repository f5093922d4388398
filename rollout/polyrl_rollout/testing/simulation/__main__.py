"""Runs random schedules, or visits every scene of a small model; exits 1 if an invariant is broken.

python -m polyrl_rollout.testing.simulation FIRST [COUNT]    the schedules of these seeds
python -m polyrl_rollout.testing.simulation explore          every scene
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from polyrl_rollout.testing.simulation import Violation, draw_schedule, run_schedule, shrink
from polyrl_rollout.testing.simulation.explore import Bounds, explore

PROGRESS_EVERY: Final = 1000
"""Seeds between two lines of progress."""


class ScheduleTotals:
    """What the schedules amounted to."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.failed = 0
        self._faults = self._events = self._tokens = 0
        self._hours = 0.0

    def add(self, seed: int) -> None:
        """Runs one seed, and prints its smallest form if it breaks an invariant."""
        schedule = draw_schedule(seed)
        self._faults += len(schedule.faults)
        try:
            result = run_schedule(schedule)
        except Violation:
            self.failed += 1
            _print_failure(seed)
        else:
            self._events += result.events
            self._tokens += result.counters.tokens_accepted
            self._hours += result.virtual_s / 3600

    def sentence(self, last: int) -> str:
        """For people."""
        verdict = f"{self.failed} failed" if self.failed else "every invariant held"
        counts = f"{self._faults:,} faults, {self._events:,} events, {self._tokens:,} tokens"
        return f"seeds {self._first} to {last}: {verdict}; {counts}, {self._hours:,.1f} virtual hours"


def _print_failure(seed: int) -> None:
    smallest, broken = shrink(draw_schedule(seed))
    print(f"seed {seed}: {broken}", flush=True)
    for fault in smallest.faults:
        print(f"  {fault.at:8.3f} s  {fault.kind} (target {fault.target}, {fault.seconds:.1f} s)", flush=True)


def _run_seeds(first: int, count: int) -> int:
    totals, last = ScheduleTotals(first), first + count - 1
    for seed in range(first, last + 1):
        totals.add(seed)
        if seed == last or (seed + 1 - first) % PROGRESS_EVERY == 0:
            print(totals.sentence(seed), flush=True)
    return 1 if totals.failed else 0


def _explore(bounds: Bounds) -> int:
    try:
        seen = explore(bounds, lambda scenes, todo: print(f"{scenes:,} scenes seen, {todo:,} to do", flush=True))
    except Violation as violation:
        print(f"{bounds}: {violation}")
        return 1
    print(f"{bounds}: {seen.scenes:,} scenes, {seen.steps:,} steps, {seen.ends:,} ends: every invariant held")
    return 0


def main(words: list[str]) -> int:
    """A line per thousand seeds, and one per failing seed with its smallest form; one line for an exploration."""
    parser = argparse.ArgumentParser(prog="python -m polyrl_rollout.testing.simulation", description=__doc__)
    if words[:1] == ["explore"]:
        for name, default in Bounds()._asdict().items():
            parser.add_argument(f"--{name}", type=int, default=default)
        return _explore(Bounds(**vars(parser.parse_args(words[1:]))))
    parser.add_argument("first", type=int, help="seed of the first schedule")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many seeds from there on")
    arguments = parser.parse_args(words)
    return _run_seeds(arguments.first, arguments.count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
