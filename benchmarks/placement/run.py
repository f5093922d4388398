"""What spot engines are worth to a step, on any fleet: `python benchmarks/placement/run.py --fleets 30 --workloads 20`.

Each fleet drawn works at each workload drawn, in virtual time, and so do its reserved engines alone. Prints the ten
worst steps, each with what was measured of it, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from bound import Bound, lower_bound
from draws import Fleet, Workload, draw_fleet, draw_workload
from measures import StepReport, train
from world import World

LIMIT: Final = 20.0
"""A step is given up after so many times what the reserved engines alone take."""
MAY_LOSE: Final = 1.03
LONGEST_S: Final = 5_000.0
"""A step of the reserved engines alone is given up."""
WORST: Final = 10
WIDTH: Final = 118
MAX_SEED: Final = 1 << 30


class Step(NamedTuple):
    """One step of one fleet at one workload."""

    fleet: Fleet
    workload: Workload
    number: int
    alone: StepReport
    report: StepReport
    bound: Bound

    @property
    def vs_reserved(self) -> float:
        return self.report.seconds / self.alone.seconds

    @property
    def loss_s(self) -> float:
        """Beyond the 3 % that a step may lose."""
        return self.report.seconds - MAY_LOSE * self.alone.seconds

    @property
    def vs_bound(self) -> float:
        return self.report.seconds / self.bound.seconds


def run_pair(fleet: Fleet, workload: Workload) -> Iterator[Step]:
    """All steps."""
    alone, together = World(fleet, workload, alone=True), World(fleet, workload)
    for number in range(len(workload.steps)):
        base = train(alone, number, LONGEST_S)
        began = together.now
        report = train(together, number, LIMIT * base.seconds) if fleet.spot else base
        yield Step(fleet, workload, number, base, report, lower_bound(fleet, workload, number, began))
        if not report.done or not base.done:
            return


def run_all(fleets: int, workloads: int, seed: int) -> list[Step]:
    """Every fleet with every workload; says on stderr how far it is."""
    drawn = [draw_fleet(random.Random(f"{seed}/fleet/{number}"), number) for number in range(fleets)]
    loads = [draw_workload(random.Random(f"{seed}/workload/{number}"), number) for number in range(workloads)]
    steps: list[Step] = []
    for fleet in drawn:
        began = time.monotonic()
        for workload in loads:
            steps += run_pair(fleet, workload)
        gc.collect()
        print(f"fleet {fleet.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return steps


def explained(step: Step) -> str:
    """A paragraph."""
    report, measured = step.report, "" if step.number else " (engines were only tried yet)"
    head = (
        f"{step.vs_reserved:.3f} x reserved, {step.vs_bound:.2f} x bound: fleet {step.fleet.name}; workload "
        f"{step.workload.name}; step {step.number}{measured}: {report.seconds:.1f} s"
        f"{'' if report.done else ', GIVEN UP'}, alone {step.alone.seconds:.1f} s, bound {step.bound.seconds:.1f} s "
        f"({step.bound.reason})"
    )
    body = f"together: {report.why}. Alone: {step.alone.why}."
    return "\n".join([head, textwrap.fill(body, WIDTH, initial_indent="    ", subsequent_indent="    ")])


def summary(steps: list[Step], seed: int) -> dict[str, float | int]:
    """The last line."""
    later = [step for step in steps if step.number] or steps
    made, engine_s = sum(step.report.generated for step in steps), sum(step.report.engine_s for step in steps)
    return {
        "seed": seed,
        "steps": len(steps),
        "givenUp": sum(not step.report.done for step in steps),
        "worstVsReserved": round(max(step.vs_reserved for step in steps), 4),
        "worstVsReservedLaterSteps": round(max(step.vs_reserved for step in later), 4),
        "slowerThanReserved": sum(step.vs_reserved > MAY_LOSE for step in steps),
        "worstLossS": round(max(step.loss_s for step in steps), 2),
        "medianVsReserved": round(statistics.median(step.vs_reserved for step in steps), 4),
        "medianVsBound": round(statistics.median(step.vs_bound for step in steps), 4),
        "medianVsBoundFirstSteps": round(statistics.median(s.vs_bound for s in steps if not s.number), 4),
        "idleShare": round(sum(step.report.needless_s for step in steps) / engine_s, 4),
        "regeneratedShare": round(max(0.0, 1 - sum(step.report.wanted for step in steps) / made), 6),
    }


def main() -> int:
    """Exit code: 1 when a step was never done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, default=6)
    parser.add_argument("--workloads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time; it is printed")
    asked = parser.parse_args()
    if asked.fleets < 1 or asked.workloads < 1:
        parser.error("--fleets and --workloads must be 1 or more")
    seed = random.randrange(MAX_SEED) if asked.seed is None else asked.seed
    print(f"seed {seed}")
    steps = run_all(asked.fleets, asked.workloads, seed)
    for place, step in enumerate(sorted(steps, key=lambda step: -step.vs_reserved)[:WORST], 1):
        print(f"\n{place:2d}. {explained(step)}")
    print()
    print(json.dumps(summary(steps, seed)))
    return int(any(not step.report.done for step in steps))


if __name__ == "__main__":
    sys.exit(main())
