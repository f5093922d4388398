"""What generation ahead of training is worth: `python benchmarks/ahead/run.py --seed 1`.

A job whose lengths are long-tailed runs on one fleet with maxStaleness 0, 1, 2 and 4, in virtual time: the production
ledger, engines of known speed and a learner that takes so long per token (`benchmarks/placement/world.py`). Engines
switch to new weights in the middle of sequences: they stop for the load and read again what they had read.

A step is compared with the larger of two times: of generating its samples when learning takes none, and of learning
alone (`vsLonger`); and with what no system can beat, all engines at full batches all the time, the reserved ones while
nothing is learned (`vsBound`). Prints a table; the last line is JSON: seconds per step by k as ratios to k = 0
(`vsSync`), to those, and `shortFirst`, the mean length of what was trained over the mean of what was drawn, which is 1
where nothing favours short answers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[1] / "placement"))

from draws import Fleet, Machine, Prompt, Sequence, Workload, full_rate
from world import Engine, Observer, World

from polyrl.sample import Group, Purpose, SamplingParams
from polyrl.wire import Submit, pack_ids
from polyrl_rollout.testing.flow import FlowEngine, Speed

STALENESS: Final = (0, 1, 2, 4)
WARM: Final = 3
"""Steps before the first that counts: the manager measures lengths and speeds, and what is ahead fills up."""
MEAN, BUDGET = 600, 9600
"""Tokens of a response: Pareto with exponent 1.5, cut at the budget."""
PROMPTS, SAMPLES = 16, 8
LIMIT_S: Final = 20_000.0
NO_LEARNING: Final = 1e-6


class AheadWorld(World):
    """A trainer that submits `ahead` later steps, and engines that go on with what they run at a switch."""

    def __init__(self, fleet: Fleet, workload: Workload, ahead: int) -> None:
        self._ahead = ahead
        self._submitted = 0
        self.trained: list[int] = []
        """Tokens of each sample that was learned."""
        super().__init__(fleet, workload)

    def train(self, step: int, limit_s: float, observer: Observer) -> float:
        began = self.now
        self.observer, self.version, self._batches = observer, step, []
        if step:
            self.publish(step)
        while self._submitted <= min(step + self._ahead, len(self.workload.steps) - 1):
            self._submit(self._submitted)
            self._submitted += 1
        self.missing = sum(len(prompt.samples) for prompt in self.workload.steps[step])
        while self.missing > 0 and self.now < began + limit_s:
            self.step()
        for batch in self._batches:
            self.acknowledge(batch)
        return self.now - began

    def _submit(self, step: int) -> None:
        groups = []
        for prompt in self.workload.steps[step]:
            self.truth |= {f"{self._group}.{index}": sample for index, sample in enumerate(prompt.samples)}
            sampling = SamplingParams(self.workload.budget, stop_token_ids=(2,))
            ids, oldest = pack_ids([9] * prompt.tokens), max(0, step - self._ahead)
            group = Group(self._group, step, purpose=Purpose.TRAIN, prompt_ids=ids, n=len(prompt.samples),
                          sampling=sampling, min_version=oldest, max_version=step)  # fmt: skip
            groups.append(group)
            self._group += 1
        self.trainer(Submit(self.request(), tuple(groups)))

    def _begin_learning(self, batch: Any) -> None:
        self.trained += [self.truth[scored.response.sample].tokens for scored in batch.samples]
        super()._begin_learning(batch)

    def _speak(self, engine: FlowEngine) -> None:
        assert isinstance(engine, Engine)
        switches = engine.loaded_at <= self.now
        super()._speak(engine)
        if switches:
            self._read_again(engine)

    def _read_again(self, engine: Engine) -> None:
        """What another version read is of no use."""
        engine.free_at = self.now
        for run in engine.decoding.values():
            engine.free_at += engine.size_of(run) * engine.speed.prefill_s
            run.ready_at = engine.free_at


def draw_job(seed: int, steps: int, learning_share: float) -> tuple[Fleet, Workload]:
    """One reserved engine and six spot ones; `learning_share`: seconds of learning per second of generating on all."""
    rng = random.Random(seed)
    speed = Speed(0.02, 64.0, prefill_s=0.00005, max_running=32)
    fleet = Fleet("1 reserved, 6 spot", (Machine(speed),), (Machine(speed),) * 6)
    drawn = tuple(tuple(_prompt(rng) for _ in range(PROMPTS)) for _ in range(steps))
    # The world counts learning per second of the reserved engine's generating; seven engines generate.
    workload = Workload("", drawn, budget=BUDGET, load_s=1.0, micro=2 * SAMPLES, learning_share=learning_share / 7)
    return fleet, workload


def _prompt(rng: random.Random) -> Prompt:
    lengths = (min(BUDGET, 2 + int(MEAN / 3 * rng.paretovariate(1.5))) for _ in range(SAMPLES))
    return Prompt(rng.randint(50, 500), tuple(Sequence((length,), (0.2,)) for length in lengths))


def learning_s(fleet: Fleet, workload: Workload, step: int) -> float:
    """Seconds of learning a step."""
    tokens = sum(sample.tokens for prompt in workload.steps[step] for sample in prompt.samples)
    return tokens * workload.learn_s(fleet)


def bound_s(fleet: Fleet, workload: Workload, step: int) -> float:
    """Seconds of a step at least."""
    tokens = sum(sample.tokens for prompt in workload.steps[step] for sample in prompt.samples)
    learning = tokens * workload.learn_s(fleet)
    reserved = sum(full_rate(machine.speed) for machine in fleet.reserved)
    spot = sum(full_rate(machine.speed) for machine in fleet.spot)
    return max(learning, (tokens + reserved * learning) / (reserved + spot))


def measure(seed: int, steps: int, learning_share: float, k: int) -> dict[str, float]:
    """One run."""
    fleet, workload = draw_job(seed, steps, learning_share)
    world = AheadWorld(fleet, workload, k)
    seconds = [world.train(step, LIMIT_S, Observer()) for step in range(steps)]
    free = AheadWorld(fleet, replace(workload, learning_share=NO_LEARNING), 0)
    generating = [free.train(step, LIMIT_S, Observer()) for step in range(steps)]
    # The last steps have less and less ahead of them.
    counted = range(WARM, steps - max(STALENESS))
    drawn = [sample.tokens for each in workload.steps for prompt in each for sample in prompt.samples]
    return {
        "stepS": statistics.mean(seconds[step] for step in counted),
        "longerS": statistics.mean(max(generating[step], learning_s(fleet, workload, step)) for step in counted),
        "boundS": statistics.mean(bound_s(fleet, workload, step) for step in counted),
        "shortFirst": statistics.mean(world.trained) / statistics.mean(drawn),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time; it is printed")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-share", type=float, default=0.8, help="learning over generating on all engines")
    asked = parser.parse_args()
    if asked.steps < WARM + max(STALENESS) + 1 or asked.learning_share <= 0:
        parser.error(f"--steps must be {WARM + max(STALENESS) + 1} or more, --learning-share above 0")
    seed = random.randrange(1 << 30) if asked.seed is None else asked.seed
    print(f"seed {seed}: {PROMPTS} x {SAMPLES} samples of {MEAN} tokens in the mean, {BUDGET} at most")
    found = {k: measure(seed, asked.steps, asked.learning_share, k) for k in STALENESS}
    ratios = {k: ratios_of(one, found[0]["stepS"]) for k, one in found.items()}
    print("maxStaleness  s per step" + "".join(f"{name:>12}" for name in ratios[0]))
    for k, row in ratios.items():
        print(f"{k:12d} {found[k]['stepS']:11.1f}" + "".join(f"{value:12.3f}" for value in row.values()))
    print(json.dumps({"seed": seed, **{name: {k: row[name] for k, row in ratios.items()} for name in ratios[0]}}))
    return 0


def ratios_of(one: dict[str, float], sync_s: float) -> dict[str, float]:
    """The row of a table."""
    step_s = one["stepS"]
    against = {"vsSync": sync_s, "vsLonger": one["longerS"], "vsBound": one["boundS"]}
    return {name: round(step_s / seconds, 4) for name, seconds in against.items()} | {
        "shortFirst": round(one["shortFirst"], 4)
    }


if __name__ == "__main__":
    sys.exit(main())
