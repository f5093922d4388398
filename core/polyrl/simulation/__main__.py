"""`python -m polyrl.simulation FIRST [COUNT]`: runs the schedules of these seeds; exit 1 at the first that fails."""

from __future__ import annotations

import argparse
import sys

from polyrl.simulation import draw_schedule, shrink


def main() -> int:
    """Prints one line per failing seed with its smallest form."""
    parser = argparse.ArgumentParser(prog="python -m polyrl.simulation", description=__doc__)
    parser.add_argument("first", type=int, help="seed of the first schedule")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many seeds from there on")
    arguments = parser.parse_args()
    for seed in range(arguments.first, arguments.first + arguments.count):
        smallest, broken = shrink(draw_schedule(seed))
        if broken is not None:
            print(f"seed {seed}: {broken}")
            for fault in smallest.faults:
                print(f"  {fault.at:8.3f} s  {fault.kind} (target {fault.target}, {fault.seconds:.1f} s)")
            return 1
    print(f"seeds {arguments.first} to {arguments.first + arguments.count - 1}: every invariant held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
