"""What engines did for each step: engine-seconds, integrated over a fleet that changes, and what one more would save.

A fold over events, in O(1) each. While a step's samples run, an engine's time is theirs, in proportion to their number;
that of evaluations is kept apart, and a checkpoint, like all that lies between steps, is nobody's. Of that time a part
would shrink with more engines, `shared` (see `speed.shared_part`); so with n engines

    rollout seconds = a + b / n      b = shared engine-seconds, a = rollout seconds - b / n

and one more saves b / (n (n + 1)) seconds, where n is the mean of the engines that could generate: the integral of
their number from the step's submission to the end of its last turn, over that time.

With `maxStaleness` several steps are under way at once, and the learner waits for none of them until the last turn of
the one that it trains. That one's part of the time since its submission is what a step takes then, at least b / n: a
long answer runs beside later steps, and holds up none of them. What an evaluation took of it meanwhile is no part of a
step: where samples of the step wait for it all of its engine-seconds over n, else what it adds to the batches in which
they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final

import msgspec

from polyrl.ledger.measures.departures import Departed
from polyrl.ledger.measures.losses import Losses
from polyrl.status import FinishedStep, StepValue

EVALUATION: Final = "evaluation"
"""Name under which engines work for evaluations; steps have names of their own."""

OPEN_STEPS: Final = 64
"""Steps under way at most; of a trainer that ends none the oldest are forgotten."""

STEPS_PER_SIZE: Final = 5
"""Finished steps kept of each size of the fleet: as many as the gap rule takes the median of, so that all of those are
there while a fleet keeps its size."""

SIZES: Final = 8
"""Sizes kept, the newest seen: enough to see a curve, few enough to forget what the model wrote long ago."""

_TIMES: Final = (StepValue.ROLLOUT_SECONDS, StepValue.TRAIN_SECONDS, StepValue.STEP_SECONDS)


class EngineWork(msgspec.Struct):
    """What an engine runs."""

    since: float = 0.0
    """Until then its time is counted."""
    samples: dict[str, int] = msgspec.field(default_factory=dict)
    """Running samples by their step's name."""

    def change(self, name: str, by: int) -> None:
        """So many more, or fewer."""
        self.samples[name] = self.samples.get(name, 0) + by
        if self.samples[name] <= 0:
            del self.samples[name]


class StepUsage(msgspec.Struct):
    """A step under way; seconds of engines."""

    number: int
    begun_at: float
    present_before: float
    """`Usage.present_until` of its first submission."""
    ended_at: float = 0.0
    present_after: float = 0.0
    """The same of its last turn's end."""
    busy_s: float = 0.0
    shared_s: float = 0.0
    held_s: float = 0.0
    """By evaluations, since its first submission."""
    held_before_end_s: float = 0.0
    """The part of it until its last turn's end."""

    def hold(self, seconds: float, since: float, at: float) -> None:
        """An evaluation took so much of an engine from `since` until `at`, which is known when what that runs changes:
        maybe after the step's end."""
        self.held_s += seconds
        if since < self.ended_at:
            self.held_before_end_s += seconds * (min(at, self.ended_at) - since) / (at - since)


class Usage(msgspec.Struct):
    """The fleet's, and each step's."""

    present: int = 0
    """Engines that could generate."""
    present_at: float = 0.0
    """Since when they are so many."""
    present_s: float = 0.0
    """Seconds of such engines until then, since the run began."""
    evaluation_s: float = 0.0
    """Busy with evaluations since the last step was finished."""
    steps: dict[str, StepUsage] = msgspec.field(default_factory=dict)
    """By name, oldest first."""
    finished: list[FinishedStep] = msgspec.field(default_factory=list)
    """See `keep_step`."""
    departed: dict[str, Departed] = msgspec.field(default_factory=dict)
    """Engines whose tokens were others than the fleet's, the newest last."""
    losses: dict[str, Losses] = msgspec.field(default_factory=dict)
    """By pool; reserved engines are not lost."""
    done: int = -1
    """The newest step that this trainer has finished: another one may do it again."""
    left_over: str = ""
    """The step that was finished last: samples of it that go on train in the next one, and are that one's work."""

    def slowdown(self, pool: str, now: float, loss_s: float) -> float:
        """How many times longer a sample takes on such engines, if each loss of one costs it `loss_s`."""
        losses = self.losses.get(pool)
        return 1.0 if losses is None else 1.0 + losses.rate(now) * loss_s

    def present_until(self, at: float) -> float:
        """Seconds of engines that could generate."""
        return self.present_s + self.present * max(0.0, at - self.present_at)

    def change_present(self, by: int, at: float) -> None:
        """So many more engines can generate, or fewer."""
        self.present_s, self.present_at = self.present_until(at), max(at, self.present_at)
        self.present += by

    def submit(self, name: str, number: int, at: float) -> None:
        """A group of the step was submitted; with its first one, what came of later steps is done again. One that comes
        late to a finished step changes nothing."""
        if name not in self.steps and number > self.done:
            before = [(key, step) for key, step in self.steps.items() if step.number < number]
            self.steps = dict(before[-(OPEN_STEPS - 1) :])
            self.steps[name] = StepUsage(number, at, present_before=self.present_until(at))

    def _under_way(self, name: str) -> StepUsage | None:
        """The step that trains what is generated under that name."""
        if name != self.left_over or name in self.steps:
            return self.steps.get(name)
        return next((step for step in self.steps.values() if step.number == self.done + 1), None)

    def end_turn(self, name: str, at: float) -> None:
        """A turn of the step has ended."""
        step = self._under_way(name)
        if step is not None:
            step.ended_at, step.present_after = at, self.present_until(at)
            step.held_before_end_s = step.held_s

    def work(self, work: EngineWork, at: float, shared: float, batched: float, waits_from: float) -> None:
        """An engine ran `work` until `at`; `shared`: part of that time that more engines would share, `batched`: that
        its batch adds to a decoding step; samples of training step `waits_from` and of later ones wait."""
        since, work.since = work.since, max(at, work.since)
        running = sum(work.samples.values())
        for name, count in work.samples.items():
            step = self._under_way(name)
            begun_at = since if step is None else max(since, step.begun_at)  # what was left over ran before
            part = max(0.0, work.since - begun_at) * count / running
            if name == EVALUATION:
                self.evaluation_s += part
                if part > 0:
                    for held in self.steps.values():
                        held.hold(part * (1.0 if held.number >= waits_from else batched), since, at)
            elif step is not None:
                step.busy_s += part
                step.shared_s += part * shared

    def finish(self, name: str, values: Mapping[str, float]) -> None:
        """The trainer reports; if it is of a step that was under way, with its times, that step is finished."""
        step = self.steps.get(name)
        if step is None or not all(isfinite(values.get(key, float("nan"))) for key in _TIMES):
            return
        del self.steps[name]
        seconds = step.ended_at - step.begun_at
        engines = (step.present_after - step.present_before) / seconds if seconds > 0 else float(self.present)
        saves = step.shared_s / (engines * (engines + 1)) if engines > 0 else 0.0
        rollout_s, train_s, step_s = (values[key] for key in _TIMES)
        if ahead := sum(other.number > step.number for other in self.steps.values()):
            held_s, least_s = (step.held_before_end_s / engines, step.shared_s / engines) if engines > 0 else (0.0, 0.0)
            rollout_s = min(rollout_s, max((seconds - held_s) / (1 + ahead), least_s))
        finished = FinishedStep(
            step=step.number,
            engines=round(engines, 3),
            rollout_seconds=round(rollout_s, 3),
            train_seconds=round(train_s, 3),
            step_seconds=round(step_s, 3),
            busy_engine_seconds=round(step.busy_s, 3),
            shared_engine_seconds=round(step.shared_s, 3),
            evaluation_engine_seconds=round(self.evaluation_s, 3),
            next_engine_saves_seconds=round(saves, 3),
            steady=values.get(StepValue.POLLUTED_STEP, 0.0) < 0.5,
        )
        self.evaluation_s, self.done, self.left_over = 0.0, max(self.done, step.number), name
        self.finished = keep_step(self.finished, finished)


def keep_step(kept: Sequence[FinishedStep], step: FinishedStep) -> list[FinishedStep]:
    """`kept` with another step, newest last, within bounds; of steps that were no measure only the newest. A trainer
    that went back to a checkpoint does steps again: those take the place of the ones before."""
    before = [one for one in kept if one.steady and one.step < step.step]
    same = [one for one in before if one.size == step.size][-(STEPS_PER_SIZE - 1) :]
    sizes = list(dict.fromkeys(one.size for one in reversed(before) if one.size != step.size))[: SIZES - 1]
    return [one for one in before if one.size in sizes or one in same] + [step]
