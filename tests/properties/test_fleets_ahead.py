"""The gap rule where steps are generated ahead of training: virtual engines, batches and answers of any length.

An engine of r samples takes (1 + r / 64) times as long for a token as one of a single sample; samples of earlier steps
come first; a step's training keeps up with its samples as they come. An evaluation between two steps goes before all
of them. The ledger's own fold says what engines did.
"""

from __future__ import annotations

import random
from collections import Counter
from math import inf
from statistics import mean
from typing import Any, Final

import numpy as np
import pytest

from polyrl.cluster.scaling.gap import FleetSize, sizing
from polyrl.ledger.measures.usage import EVALUATION, EngineWork, Usage
from polyrl.manifest.job import JobSpec, PolyRLJob
from polyrl.status import StepValue
from polyrl.testing.job_values import raw_job

SAMPLES, MEAN_TOKENS, MOST_TOKENS = 256, 800.0, 4000.0
SPREAD: Final = 0.6
"""Of the logarithm of a sample's tokens."""
MAX_RUNNING, HALF_BATCH, TOKEN_S = 32, 64.0, 0.02
TICK_S, TRAIN_S, REST_S = 1.0, 60.0, 1.0
STEPS, SETTLED = 36, 16
EVALUATED: Final = 0
"""In place of a step's number: goes first."""
MOST_ENGINES: Final = 7
"""With four a step takes hardly longer than training, as fleets of one size showed; with the time between two steps'
last answers for that of generation fleets had eight to twelve."""


class Run:
    """Steps of a trainer, with `ahead` more under way."""

    def __init__(self, ahead: int, seed: int) -> None:
        self.ahead, self.draw, self.now = ahead, np.random.default_rng(seed), 0.0
        self.draw_evaluated = np.random.default_rng(seed)
        self.usage, self.present = Usage(), 0
        self.steps, self.engines, self.left = np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        """Of samples that run: their step, their engine, tokens to come."""
        self.queue: list[tuple[int, float]] = []
        self.missing: dict[int, int] = {}
        self.submitted: dict[int, float] = {}
        self.generated_at, self.took = 0.0, list[float]()

    def resize(self, engines: int) -> None:
        moved = self.engines >= engines
        self.queue += zip(self.steps[moved].tolist(), self.left[moved].tolist(), strict=True)
        self._keep(~moved)
        self.usage.change_present(engines - self.present, self.now)
        self.present = engines

    def _keep(self, kept: Any) -> None:
        self.steps, self.engines, self.left = self.steps[kept], self.engines[kept], self.left[kept]

    def _submit(self, number: int) -> None:
        if number not in self.submitted:
            self.submitted[number] = self.now
            self.usage.submit(str(number), number, self.now)
            self._ask(number, SAMPLES, self.draw)

    def _ask(self, number: int, samples: int, draw: np.random.Generator) -> None:
        self.missing[number] = samples
        tokens = draw.lognormal(np.log(MEAN_TOKENS) - SPREAD**2 / 2, SPREAD, samples)
        self.queue += [(number, float(one)) for one in np.minimum(MOST_TOKENS, tokens)]

    def _tick(self) -> None:
        running = np.bincount(self.engines, minlength=self.present)
        self.queue.sort(key=lambda one: one[0])
        while self.queue and running.min() < MAX_RUNNING:
            (number, tokens), engine = self.queue.pop(0), int(running.argmin())
            self.steps, self.engines = np.append(self.steps, number), np.append(self.engines, engine)
            self.left, running[engine] = np.append(self.left, tokens), running[engine] + 1
        full = (running >= MAX_RUNNING) | bool(self.queue)
        batched = np.where(running > 1, running / (HALF_BATCH + running), 0.0)
        shared, waits_from = np.where(full, 1.0, batched), min((step for step, _ in self.queue if step), default=inf)
        for one in np.flatnonzero(running):
            counts = Counter(self.steps[self.engines == one].tolist())
            work = {EVALUATION if number == EVALUATED else str(number): count for number, count in counts.items()}
            parts = {"shared": float(shared[one]), "batched": float(batched[one])}
            self.usage.work(EngineWork(self.now, work), self.now + TICK_S, **parts, waits_from=waits_from)
        self.left = self.left - TICK_S / (TOKEN_S * (1 + running[self.engines] / HALF_BATCH))
        self.now += TICK_S
        for number in self.steps[self.left <= 0].tolist():
            self.missing[number] -= 1
            self.usage.end_turn(EVALUATION if number == EVALUATED else str(number), self.now)
        self._keep(self.left > 0)

    def evaluate(self, samples: int) -> None:
        """The learner waits for it."""
        self._ask(EVALUATED, samples, self.draw_evaluated)
        while self.missing[EVALUATED]:
            self._tick()

    def step(self, number: int) -> float:
        """Seconds that it took."""
        began, trained = self.now, 0.0
        for ahead in range(number, number + self.ahead + 1):
            self._submit(ahead)
        while trained < SAMPLES:
            self._tick()
            trained = min(SAMPLES - self.missing[number], trained + SAMPLES * TICK_S / TRAIN_S)
        ended_at = self.usage.steps[str(number)].ended_at
        # As the trainer reckons (`StepsAhead.generate_s`).
        self.took.append(max(0.0, ended_at - max(self.submitted[number], self.generated_at)))
        self.generated_at, newest = max(self.generated_at, ended_at), self.took[-self.ahead - 1 :]
        step_s = self.now - began + REST_S
        values = {
            str(StepValue.ROLLOUT_SECONDS): sum(newest) / len(newest),
            str(StepValue.STEP_SECONDS): step_s,
            str(StepValue.TRAIN_SECONDS): TRAIN_S,
            str(StepValue.POLLUTED_STEP): float(number == 1),
        }
        self.usage.finish(str(number), values)
        return step_s


def sized_run(spec: JobSpec, ahead: int, start: int, seed: int, evaluated: int = 0) -> tuple[list[int], list[float]]:
    """Sizes and seconds, step by step; so many samples are evaluated after each."""
    run, sizes, took = Run(ahead, seed), [start], list[float]()
    window, change = tuple[int, ...](), 0
    for number in range(1, STEPS + 1):
        run.resize(sizes[-1])
        took.append(run.step(number))
        run.evaluate(evaluated)
        fleet = FleetSize(sizes[-1], last_change=change)
        sized = sizing(spec, run.usage.finished, number - 1, window, fleet)
        window, change = sized.window, sized.desired_replicas - sizes[-1] or change
        sizes.append(sized.desired_replicas)
    return sizes, took


def fleet_ahead(ahead: int) -> JobSpec:
    gap = {"maxScaleUpPerStep": 8, "maxScaleDownPerStep": 4}
    raw = raw_job({"minReplicas": 1, "maxReplicas": 64}, scaling={"gap": gap})
    raw["spec"]["recipe"]["algorithm"]["maxStaleness"] = ahead
    return PolyRLJob.model_validate(raw).spec


@pytest.mark.parametrize("evaluated", [0, 64, 256], ids=["no evaluation", "a short one after each step", "a long one"])
@pytest.mark.parametrize("start", [2, 16])
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_fleet_that_is_ahead_has_no_more_rollouts_than_keep_the_learner_busy(
    seed: int, ahead: int, start: int, evaluated: int
) -> None:
    """Where no step after an evaluation was a measure, no fleet of a run that evaluates after each step moved."""
    sizes, took = sized_run(fleet_ahead(ahead), ahead, start, random.Random(seed).randrange(1 << 30), evaluated)
    settled = took[SETTLED:]
    assert sum(settled) / len(settled) <= 1.25 * (TRAIN_S + REST_S), sizes
    assert max(sizes[SETTLED:]) <= MOST_ENGINES, sizes


@pytest.mark.parametrize("evaluated", [64, 256, 1024])
@pytest.mark.parametrize("engines", [2, 4, 8])
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_step_is_no_longer_for_the_evaluation_before_it(seed: int, ahead: int, engines: int, evaluated: int) -> None:
    """With the evaluation's seconds in it, it was up to 2.7 times as long."""
    draws = random.Random(seed).randrange(1 << 30)
    plain, held_up = (measured(Run(ahead, draws), engines, count) for count in (0, evaluated))
    assert 0.75 * plain <= held_up <= 1.1 * plain, "what runs beside the evaluation is there sooner"


def measured(run: Run, engines: int, evaluated: int) -> float:
    """Seconds of generation of a step, in the mean."""
    run.resize(engines)
    for number in range(1, SETTLED + 1):
        run.step(number)
        run.evaluate(evaluated)
    return mean(one.rollout_seconds for one in run.usage.finished)
