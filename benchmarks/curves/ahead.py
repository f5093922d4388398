"""What staleness costs a policy: learning curves with `maxStaleness` 0, 1, 2 and 4, on real processes.

    python benchmarks/curves/ahead.py --seeds 0 1 2 --out FOLDER

The sort-digits example without its faults, several seeds; of one seed the model that RL starts from, the data and the
settings are the same for every k. Runs are kept in FOLDER, so a second call goes on where the first one ended.

Prints the reward at equal steps with its spread over seeds, whether each k differs from k = 0 by more than seeds do,
and the time of a step: over the longer of generating and training (`timing_s/gen`, `timing_s/train` of the same run),
without the first steps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from polyrl_runs import Run, run_job
from tables import Curve, is_seed_noise, scores, table, windowed

JOB: Final = Path(__file__).parents[2] / "examples/sort-digits/job.yaml"
LEAST_SEEDS: Final = 2
WARM: Final = 5
"""Steps before the first whose time counts: the manager measures speeds, and what is ahead fills up."""


def fields(steps: int, k: int) -> dict[str, Any]:
    """What is overridden."""
    return {
        "spec.faultInjection": [],
        "spec.recipe.algorithm.steps": steps,
        "spec.recipe.algorithm.maxStaleness": k,
        "spec.recipe.evaluation.everySteps": steps,
        "spec.recipe.checkpoint.everySteps": steps,
        "spec.recipe.logging.tensorboard": False,
    }


def times(runs: Sequence[Run]) -> dict[str, float]:
    """Over steps and seeds: medians of a step's seconds, of the step over the longer of its parts; mean staleness."""
    steps = [step for run in runs for step in run.steps()[WARM:]]
    return {
        "stepS": round(statistics.median(step["timing_s/step"] for step in steps), 3),
        "generateS": round(statistics.median(step["timing_s/gen"] for step in steps), 3),
        "trainS": round(statistics.median(step["timing_s/train"] for step in steps), 3),
        "overLonger": round(statistics.median(step["perf/step_ratio"] for step in steps), 3),
        "staleness": round(statistics.mean(step.get("rollout/staleness", 0.0) for step in steps), 2),
        "mismatchK3": round(statistics.mean(step["rollout_corr/k3_kl"] for step in steps), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="0 first")
    parser.add_argument("--steps", type=int, default=60, help="RL steps of each run")
    parser.add_argument("--out", type=Path, required=True, help="folder that the runs are kept in")
    asked = parser.parse_args()
    if asked.staleness[0] != 0:
        parser.error("--staleness begins with 0, which the others are compared with")
    made: dict[int, list[Run]] = {k: [] for k in asked.staleness}
    for (
        seed
    ) in asked.seeds:  # a seed's runs one after the other, so that all k share a machine's better and worse hours
        for k in asked.staleness:
            made[k].append(run_job(JOB, asked.out / f"k{k}-seed{seed}", seed, fields(asked.steps, k)))
            print(f"k = {k}, seed {seed}: done", flush=True)
    report(made, asked.steps)


def report(made: dict[int, list[Run]], steps: int) -> None:
    """Prints the tables and the line of JSON."""
    curves: dict[str, list[Curve]] = {f"k = {k}": [windowed(run.rewards()) for run in runs] for k, runs in made.items()}
    measured = {k: times(runs) for k, runs in made.items()}
    print(table(curves, steps, "k = 0"))
    print("maxStaleness" + "".join(f"{name:>12}" for name in measured[0]) + "   greedy, at the end")
    ends = {k: [run.summary["exactMatch"]["afterRl"] for run in runs] for k, runs in made.items()}
    for k, row in measured.items():
        print(f"{k:12d}" + "".join(f"{value:12}" for value in row.values()) + f"   {statistics.mean(ends[k]):.3f}")
    if len(made[0]) < LEAST_SEEDS:
        print("one seed a side says nothing about the noise between seeds")
        print(json.dumps({"times": measured, "greedyAtEnd": ends}))
        return
    verdicts = {k: is_seed_noise(curves[f"k = {k}"], curves["k = 0"]) for k in list(made)[1:]}
    for k, alike in verdicts.items():
        print(f"maxStaleness {k} learns {'as k = 0 does, within seed noise' if alike else 'otherwise than k = 0'}")
    against = {k: scores(curves[f"k = {k}"], curves["k = 0"]) for k in verdicts}
    print(json.dumps({"withinSeedNoise": verdicts, "t": against, "times": measured, "greedyAtEnd": ends}))


if __name__ == "__main__":
    main()
