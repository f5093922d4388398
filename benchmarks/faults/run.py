"""Short jobs hit by faults at random instants: `python benchmarks/faults/run.py --runs 200 --seed 0 --real-every 20`.

Each run is one job over real processes with one to four faults, all drawn from the run's own seed: `--seed`, then the
next one. What it trained must be what the undisturbed run of the same job trained, which for the hashed job must be
what is computed without any process. Prints a line a run and a table at the end; ends with 1, naming the seeds, when a
run was not equal, hung, left a process, or broke an invariant.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from computed import hashed_outcome
from jobs import HASHED, REAL, JobKind
from one_run import RunResult, run_job
from outcome import Outcome
from plan import Hand, PlannedFault, draw, draw_harder, stated

from polyrl.forks import ForkServer
from polyrl_cli.chaos.kinds import ChaosAction, Target
from polyrl_cli.local.loaded import loaded_libraries

COLUMNS: Final = (ChaosAction.KILL, ChaosAction.FREEZE, Hand.OUTSIDE, Hand.POWER)


class Series:
    """All runs of one command."""

    def __init__(
        self, out: Path, draw_faults: Callable[[int], list[PlannedFault]], forks: ForkServer | None = None
    ) -> None:
        """`draw_faults`: of a seed; `forks`: makes the processes that it takes."""
        self.results: dict[str, RunResult] = {}
        """By name, faulty ones too."""
        self.failed: list[int] = []
        self._out, self._draw, self._forks = out, draw_faults, forks
        self._undisturbed: dict[str, Outcome] = {}

    def run(self, seed: int, kind: JobKind) -> None:
        """One run; its folder stays when it is not as it must be."""
        undisturbed = self._undisturbed_of(kind)
        result = self._run_one(f"{kind.name}-{seed}", kind, self._draw(seed), undisturbed)
        if result.violations:
            self.failed.append(seed)

    def _undisturbed_of(self, kind: JobKind) -> Outcome:
        """Raises SystemExit when the job does not even run undisturbed."""
        if kind.name not in self._undisturbed:
            known = None if kind.name == REAL.name else hashed_outcome()
            result = self._run_one(f"{kind.name}-undisturbed", kind, [], known)
            if result.violations:
                sys.exit(f"the undisturbed {kind.name} run failed; see {self._out}")
            self._undisturbed[kind.name] = result.outcome
        return self._undisturbed[kind.name]

    def _run_one(self, name: str, kind: JobKind, faults: list[PlannedFault], undisturbed: Outcome | None) -> RunResult:
        root = self._out / name
        root.mkdir(parents=True)
        result = self.results[name] = run_job(root, kind, faults, undisturbed, self._forks)
        planned = "; ".join(map(str, faults)) or "none"
        verdict = "NOT EQUAL" if result.violations else "equal"
        print(f"{name:<20} {result.seconds:6.1f} s  {result.moved:3} moves  {verdict}  {planned}", flush=True)
        for violation in result.violations:
            print(f"    {violation}", flush=True)
        if result.violations:
            print(f"    its folder: {root}", flush=True)
        else:
            shutil.rmtree(root)
        return result

    def table(self) -> str:
        """What was injected, and what came of it."""
        runs = {name: result for name, result in self.results.items() if not name.endswith("undisturbed")}
        done = [fault for result in runs.values() for fault in result.faults]
        injected = Counter((column_of(fault), fault.request.target) for fault in done)
        lines = [f"{'':<8}" + "".join(f"{column:>9}" for column in COLUMNS)]
        lines += [f"{target:<8}" + "".join(f"{injected[c, target]:>9}" for c in COLUMNS) for target in Target]
        lines += [_kind_line(kind, [j for n, j in runs.items() if n.startswith(kind.name)]) for kind in (HASHED, REAL)]
        return "\n".join(lines)


def column_of(fault: PlannedFault) -> str:
    """Of the table: what was done, where it was not the runner who by."""
    return fault.request.action if fault.hand is Hand.RUNNER else fault.hand


def _kind_line(kind: JobKind, runs: list[RunResult]) -> str:
    if not runs:
        return f"{kind.name}: no run"
    seconds = sorted(result.seconds for result in runs)
    equal = sum(not result.violations for result in runs)
    hit = sum(bool(result.faults) for result in runs)
    samples = sum(result.outcome.samples for result in runs)
    mixed = sum(result.outcome.mixed for result in runs)
    return (
        f"{kind.name}: {equal} of {len(runs)} runs equal, {samples} samples compared, {mixed} of them by several "
        f"versions, {hit} runs hit by "
        f"{sum(len(result.faults) for result in runs)} faults, {sum(result.moved for result in runs)} moves, "
        f"median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s, deadline {kind.deadline_s:g} s"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one has the next one")
    parser.add_argument(
        "--real-every", type=int, default=0, metavar="K", help="seeds that K divides run the real job; 0: none"
    )
    parser.add_argument(
        "--fault",
        type=stated,
        action="append",
        default=[],
        metavar="ACTION:ROLE:SHARE[:SECONDS]",
        help="instead of drawn ones; SHARE of the job's tokens, in rising order",
    )
    parser.add_argument(
        "--harder", action="store_true", help="draw kills by somebody else at the start, and power cuts, instead"
    )
    parser.add_argument(
        "--deadline", type=float, default=HASHED.deadline_s, metavar="S", help="of a hashed run, on a busier machine"
    )
    parser.add_argument("--ahead", type=int, default=0, metavar="K", help="maxStaleness of the hashed job")
    parser.add_argument("--ranks", type=int, default=1, metavar="R", help="processes that learn the real job")
    parser.add_argument("--out", type=Path, help="where runs that failed stay; default: a temporary folder")
    return parser.parse_args()


def main() -> int:
    """Exit code."""
    options = arguments()
    out = options.out or Path(tempfile.mkdtemp(prefix="polyrl-faults-"))
    hashed = dataclasses.replace(HASHED, ahead=options.ahead, deadline_s=options.deadline)
    real = dataclasses.replace(REAL, ranks=options.ranks)
    drawn = draw_harder if options.harder else draw
    with loaded_libraries() as forks:
        series = Series(out.resolve(), lambda seed: options.fault or drawn(seed), forks)
        for seed in range(options.seed, options.seed + options.runs):
            is_real = options.real_every and seed % options.real_every == 0
            series.run(seed, real if is_real else hashed)
    print(series.table())
    if series.failed:
        print(f"seeds of runs that failed: {', '.join(map(str, series.failed))}")
    elif not options.out:
        shutil.rmtree(out)
    return 1 if series.failed else 0


if __name__ == "__main__":
    sys.exit(main())
