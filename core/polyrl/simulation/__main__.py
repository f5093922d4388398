"""`python -m polyrl.simulation FIRST [COUNT]`: runs the schedules of these seeds; exit 1 if any breaks an invariant.

Read next: `run`.
"""

from __future__ import annotations

import argparse
import sys

from polyrl.simulation import Violation, draw_schedule, run_schedule, shrink

TELL_EVERY = 1000
"""Seeds between two lines of progress."""


class Tally:
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
            _tell_failure(seed)
        else:
            self._events += result.events
            self._tokens += result.status.tokens.kept
            self._hours += result.virtual_s / 3600

    def sentence(self, last: int) -> str:
        """For people."""
        verdict = f"{self.failed} failed" if self.failed else "every invariant held"
        counts = f"{self._faults:,} faults, {self._events:,} events, {self._tokens:,} tokens"
        return f"seeds {self._first} to {last}: {verdict}; {counts}, {self._hours:,.1f} virtual hours"


def _tell_failure(seed: int) -> None:
    smallest, broken = shrink(draw_schedule(seed))
    print(f"seed {seed}: {broken}", flush=True)
    for fault in smallest.faults:
        print(f"  {fault.at:8.3f} s  {fault.kind} (target {fault.target}, {fault.seconds:.1f} s)", flush=True)


def main() -> int:
    """A line per thousand seeds, and one per failing seed with its smallest form."""
    parser = argparse.ArgumentParser(prog="python -m polyrl.simulation", description=__doc__)
    parser.add_argument("first", type=int, help="seed of the first schedule")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many seeds from there on")
    arguments = parser.parse_args()
    tally, last = Tally(arguments.first), arguments.first + arguments.count - 1
    for seed in range(arguments.first, last + 1):
        tally.add(seed)
        if seed == last or (seed + 1 - arguments.first) % TELL_EVERY == 0:
            print(tally.sentence(seed), flush=True)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
