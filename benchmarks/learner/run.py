"""How fast the learner is, beside TRL and a plain loop, and beside busy rewards: `python benchmarks/learner/run.py`.

`vsTrl` and `vsHf` are its tokens per CPU second divided by theirs (`beside_peers`); TRL is installed, when it is first
needed, into an environment of its own.

One process is a trainer: the learner's real backend and a pool of reward workers, as a run has them. In turns the
learner works alone and beside rewards that compute without end, so that what else the machine does falls on both. The
one line on stdout is a JSON object; `besideRewards` is the median over pairs of learner tokens per second beside them,
divided by those without.

The reward is `busy_reward`; the backend and the pool are the trainer's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from beside_peers import compare, drawn_batch

from polyrl.manifest.parts.user_code import RewardSpec
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.pools import reward_pool
from polyrl_trainer.user_code.workers.pool import WorkerPool

CORES: Final = len(os.sched_getaffinity(0))
VOCABULARY: Final = 2048
MODEL: Final = {
    "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SEQUENCES: Final = 8
LENGTH: Final = 128
CALL_TIMEOUT_S: Final = 600.0
"""None is meant to miss it."""
WAIT_S: Final = 600.0


@dataclass(eq=False)
class Rewards:
    """So many calls in flight, for as long as they are on."""

    pool: WorkerPool
    at_once: int
    done: int = 0
    _on: bool = False
    _calls: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self) -> None:
        self._on = True
        self._calls = [asyncio.create_task(self._call_on()) for _ in range(self.at_once)]

    async def end(self) -> None:
        """When the last call has its answer."""
        self._on = False
        await asyncio.gather(*self._calls)

    async def _call_on(self) -> None:
        while self._on:
            await self.pool.call([draw(np.random.default_rng(0))], CALL_TIMEOUT_S)
            self.done += 1


def draw(chance: np.random.Generator) -> Sample:
    tokens = chance.integers(3, VOCABULARY, LENGTH)
    mask = np.ones(LENGTH, np.float32)
    mask[0] = 0
    return Sample(tokens.astype(np.int64), mask, prompt_length=1)


async def tokens_per_s(backend: TorchBackend, batch: Sequence[Sample], seconds: float) -> float:
    """Of whole steps, for at least this long."""
    began, tokens = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        sums = await asyncio.wrap_future(backend.forward_backward(batch, sft_loss))
        await asyncio.wrap_future(backend.optim_step(normalizer=sums["tokens"]))
        tokens += LENGTH * len(batch)
    return tokens / spent


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Pairs of windows, their order in turns."""
    engine = EngineConfig(arguments.device, arguments.threads)
    optimizer = OptimizerConfig(learning_rate=1e-4, total_steps=1_000_000)
    model = ModelConfig(MODEL, dtype="float32")
    backend = create_torch_backend(model, engine, optimizer, CheckpointConfig())
    chance = np.random.default_rng(0)
    batch = [draw(chance) for _ in range(SEQUENCES)]
    spec = RewardSpec(function="busy_reward:score", workers=arguments.workers)
    pool = reward_pool(spec, Path(__file__).parent)
    pairs: list[tuple[float, float]] = []
    with closing(backend), closing(pool):
        pool.start()
        await pool.ready()
        rewards = Rewards(pool, arguments.rewards)
        await tokens_per_s(backend, batch, arguments.seconds)  # warm
        for number in range(arguments.pairs):
            found = {}
            for beside in (bool(number % 2), not number % 2):
                if beside:
                    rewards.begin()
                found[beside] = await tokens_per_s(backend, batch, arguments.seconds)
                if beside:
                    await rewards.end()
            pairs.append((found[False], found[True]))
            print(
                f"pair {number}: alone {found[False]:.0f}, beside {found[True]:.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    ratios = [beside / alone for alone, beside in pairs]
    return {
        "besideRewards": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in sorted(ratios)],
        "tokensPerSecondAlone": round(statistics.median(alone for alone, _ in pairs)),
        "rewardsDone": rewards.done,
        "rewardsAtOnce": arguments.rewards,
        "workers": pool.workers,
        "threads": arguments.threads,
        "cores": CORES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window")
    parser.add_argument("--rewards", type=int, default=16, help="calls in flight")
    parser.add_argument("--workers", type=int, default=None, help="default: as in a run, half of the cores")
    parser.add_argument("--threads", type=int, default=max(1, CORES // 2), help="of the learner")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--without-rewards", action="store_true", help="measure beside TRL and the plain loop only")
    arguments = parser.parse_args()
    found = compare(MODEL, drawn_batch(MODEL), arguments.threads, arguments.pairs, arguments.seconds)
    if not arguments.without_rewards:
        found |= asyncio.run(measure(arguments))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
