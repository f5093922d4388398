"""Fleets and workloads at random: what a run of the benchmark is made of, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from typing import Final

from polyrl_rollout.testing.flow import Speed

HORIZON_S: Final = 20_000.0
"""Longer than any run."""
KINDS: Final = ("none", "tiny", "slow", "few", "few", "mixed", "mixed", "many", "flapping", "flapping", "rejecter")
"""What spot engines of a fleet are like."""
TURN_ENVIRONMENT: Final = 64
"""Tokens that an environment writes between two turns."""


@dataclass(frozen=True)
class Machine:
    """An engine of a fleet, with its fate."""

    speed: Speed
    up: tuple[tuple[float, float], ...] = ((0.0, inf),)
    """When it is there; each time it greets as a new engine."""
    notice_s: float = 0.0
    """Announced before it ends."""
    pause_at: float = inf
    """When it is silent for PAUSE_S."""
    rejects: bool = False
    """It refuses every sample."""


@dataclass(frozen=True)
class Fleet:
    name: str
    reserved: tuple[Machine, ...]
    spot: tuple[Machine, ...]


@dataclass(frozen=True)
class Sequence:
    """What a sample will be, known to nobody before."""

    turns: tuple[int, ...]
    """Tokens of each."""
    delays: tuple[float, ...]
    """Seconds after each turn: of a tool, at last of the verdict."""

    @property
    def tokens(self) -> int:
        """Generated in all."""
        return sum(self.turns)

    @property
    def learned(self) -> int:
        """Tokens of its response, an environment's too."""
        return self.tokens + TURN_ENVIRONMENT * (len(self.turns) - 1)


@dataclass(frozen=True)
class Prompt:
    """A group."""

    tokens: int
    samples: tuple[Sequence, ...]


@dataclass(frozen=True)
class Workload:
    name: str
    steps: tuple[tuple[Prompt, ...], ...]
    budget: int
    """max_new_tokens."""
    load_s: float
    """An engine's, for the weights of each step."""
    micro: int
    """Samples that the learner asks for at least."""
    learning_share: float
    """Seconds of learning per second that the reserved engines need to generate."""

    def learn_s(self, fleet: Fleet) -> float:
        """Seconds of learning per token of response."""
        rate = sum(full_rate(machine.speed) for machine in fleet.reserved)
        return self.learning_share / rate

    def longest_context(self) -> int:
        """Of any sample at its end."""
        most = max(len(s.turns) for step in self.steps for prompt in step for s in prompt.samples)
        prompts = max(prompt.tokens for step in self.steps for prompt in step)
        return prompts + self.budget + TURN_ENVIRONMENT * most


def full_rate(speed: Speed, running: int | None = None) -> float:
    """Tokens per second at most, of `running` samples or of all that it takes."""
    batch = speed.max_running if running is None else min(running, speed.max_running)
    return batch / (speed.step_s * (1 + batch / speed.half_batch))


def draw_fleet(rng: random.Random, number: int) -> Fleet:
    """Reserved engines are alike and sound; spot engines differ, and some fail."""
    base = Speed(
        rng.uniform(0.01, 0.04),
        rng.choice((16.0, 64.0, 256.0)),
        prefill_s=rng.choice((0.00003, 0.0001, 0.0004)),
        max_running=rng.choice((16, 32, 64, 128)),
        kv_tokens=rng.choice((200_000, 1_000_000)),
    )
    reserved = (Machine(base),) * rng.randint(1, 4)
    kind = rng.choice(KINDS)
    count = {"none": 0, "tiny": 1, "slow": rng.randint(1, 4), "few": rng.randint(1, 4)}.get(kind, rng.randint(2, 32))
    spot = tuple(_machine(rng, base, kind) for _ in range(count))
    if kind == "rejecter":
        spot = (Machine(spot[0].speed, rejects=True), *spot[1:])
    return Fleet(f"{number}: {len(reserved)} reserved, {count} {kind if count else 'spot'}", reserved, spot)


def _machine(rng: random.Random, base: Speed, kind: str) -> Machine:
    if kind == "tiny":
        return Machine(base._replace(step_s=2 * base.step_s, max_running=4))
    if kind == "slow":
        return Machine(base._replace(step_s=10 * base.step_s, prefill_s=10 * base.prefill_s))
    speed = base if kind == "many" else _varied(rng, base)
    if kind == "flapping" or (kind == "mixed" and rng.random() < 0.2):
        return Machine(speed, _flaps(rng), notice_s=rng.choice((0.0, 0.0, 5.0, 30.0, 60.0)))
    if rng.random() < 0.2:
        return Machine(speed, ((rng.uniform(0.0, 120.0), inf),))
    if rng.random() < 0.1:
        return Machine(speed, pause_at=rng.uniform(5.0, 100.0))
    return Machine(speed)


def _varied(rng: random.Random, base: Speed) -> Speed:
    factor = rng.lognormvariate(0.0, 0.5)
    return Speed(
        base.step_s * factor,
        rng.choice((8.0, 32.0, 64.0, 256.0)),
        prefill_s=base.prefill_s * factor,
        max_running=rng.choice((8, 16, 32, 128)),
        kv_tokens=rng.choice((20_000, 60_000, 200_000, 1_000_000)),
        max_context=rng.choice((4_096, 16_384, 131_072, 131_072)),
    )


def _flaps(rng: random.Random) -> tuple[tuple[float, float], ...]:
    mean_s, at, found = rng.choice((30.0, 100.0, 300.0)), 0.0, []
    while at < HORIZON_S:
        end = at + rng.expovariate(1 / mean_s)
        found.append((at, end))
        at = end + rng.uniform(20.0, 300.0)
    return tuple(found)


def draw_workload(rng: random.Random, number: int) -> Workload:
    """Two or three steps of the same kind; the first one meets a manager that has measured nothing."""
    n = rng.choice((1, 4, 8, 16))
    prompts = max(1, rng.choice((16, 32, 64, 128)) // n)
    kind, mean = rng.choice(("lognormal", "bimodal", "heavy")), rng.choice((100, 300, 600))
    turns = rng.choice((1, 1, 1, rng.randint(2, 6)))
    budget = mean * rng.choice((4, 8, 16))
    delays = (rng.choice((0.0, 0.5, 5.0)), rng.choice((0.0, 0.0, 0.2, 3.0)))
    longest_prompt = rng.choice((100, 500, 2000, 8000))
    steps = tuple(
        tuple(
            Prompt(
                rng.randint(50, longest_prompt),
                tuple(_sequence(rng, _length(rng, kind, mean), turns, budget, delays) for _ in range(n)),
            )
            for _ in range(prompts)
        )
        for _ in range(rng.randint(2, 3))
    )
    name = f"{number}: {prompts} x {n} {kind} of {mean} to {budget}, {turns} turns, prompts to {longest_prompt}"
    return Workload(
        name,
        steps,
        budget=budget,
        load_s=rng.choice((1.0, 3.0, 8.0)),
        micro=min(n * prompts, n * rng.choice((1, 2, 4))),
        learning_share=rng.choice((0.1, 0.3, 0.6, 1.0)),
    )


def _length(rng: random.Random, kind: str, mean: int) -> int:
    if kind == "lognormal":
        return int(mean * rng.lognormvariate(-0.32, 0.8))
    if kind == "bimodal":
        return int(mean * (rng.uniform(2.0, 4.0) if rng.random() < 0.2 else rng.uniform(0.1, 0.8)))
    return int(mean * 0.4 * rng.paretovariate(1.5))


def _sequence(rng: random.Random, length: int, turns: int, budget: int, delays: tuple[float, float]) -> Sequence:
    total = max(2 * turns, min(length, budget))
    each, rest = divmod(total, turns)
    tools = tuple(delays[0] * rng.uniform(0.2, 2.0) for _ in range(turns - 1))
    return Sequence((*(each,) * (turns - 1), each + rest), (*tools, delays[1] * rng.uniform(0.2, 2.0)))
