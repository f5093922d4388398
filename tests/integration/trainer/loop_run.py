"""The RL loop over an in-memory rollout side, for the tests of its steps and of its evaluations."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck

from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import Purpose
from polyrl.wire import unpack_ids
from polyrl_trainer.backend import StepResult
from polyrl_trainer.backends.weight_stream import write_stream
from polyrl_trainer.checkpoints import Checkpoints, read_checkpoint
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.examples import prepare_prompts
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import EOS_ID, CharacterTokenizer
from polyrl_trainer.environments import CalculatorEnvironment
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.generation.supply import GroupSupply
from polyrl_trainer.loops.evaluation import Evaluator
from polyrl_trainer.loops.rl_loop import RlParts, run_rl_training
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.preparation import EvaluationPrompts
from polyrl_trainer.sample_log.log import SampleLog
from polyrl_trainer.session import Session, run_beside
from polyrl_trainer.state import TrainerState, TrainingStage
from polyrl_trainer.testing.fake_rollouts import FakeRollouts
from polyrl_trainer.testing.inline_calls import InlineCalls
from polyrl_trainer.testing.memory_publisher import MemoryPublisher
from polyrl_trainer.user_code.episodes import Episodes
from polyrl_trainer.user_code.rewards import CustomGroupFilter, Failures, RewardFunction
from polyrl_trainer.user_code.workers.conversations import LocalConversations
from polyrl_trainer.weights.policy_versions import PolicyVersions

TOKENIZER = CharacterTokenizer("0123456789=<>/+acelrstu")
PROMPTS = 23
LONG_TIMEOUT_S = 60.0
"""For user code that answers at once: one that is starved has not hung."""
QUICK_OR_NOT = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


class CountingBackend:
    """Learns nothing; checks that gradients are accumulated and stepped as the port says."""

    def __init__(self) -> None:
        self.micro_batches: list[list] = []
        self.steps: list[int] = []
        self.trained: list[tuple[str, ...]] = []
        self.pending = 0
        self.mini_batches = 1

    def forward_backward(self, batch, loss, temperature=1.0, *, entropy_gradient=False):
        self.micro_batches.append([one.id for one in batch])
        self.pending += len(batch)
        tokens = float(sum(one.loss_mask.sum() for one in batch))
        assert all(one.advantages is not None and one.rollout_log_probs is not None for one in batch)
        old = [one.old_log_probs for one in batch if one.old_log_probs is not None]
        assert not old or {array[0] for array in old} == {len(self.steps) // self.mini_batches * self.mini_batches}
        sums = {"pg_loss": 0.0, "entropy": 0.0, "loss": 0.0, "tokens": tokens}
        return done({**sums, "positions": tokens, "padded_positions": 0.0, "padding_fraction": 0.0})

    def log_probs(self, batch, temperature=1.0):
        """The number of optimizer steps before, in place of a score."""
        assert self.pending == 0
        return done([np.full(one.length, len(self.steps), dtype=np.float32) for one in batch])

    def optim_step(self, normalizer):
        assert self.pending == normalizer, "an optimizer step over another number of samples than it divides by"
        self.steps.append(self.pending)
        self.pending = 0
        return done(StepResult(grad_norm=1.0, learning_rate=0.1))

    def discard_gradients(self):
        self.pending = 0
        return done(None)

    def export_weights(self, room):
        return write_stream({"w": torch.zeros(1)}, room)

    def serving_files(self):
        return {}

    def save(self, folder, *, copied):
        assert self.pending == 0
        (folder / "steps.json").write_text(json.dumps(len(self.steps)))
        return done(None)

    def state_bytes(self):
        return 8

    def load(self, folder):
        self.steps = [0] * json.loads((folder / "steps.json").read_text())


def done(value):
    future = Future()
    future.set_result(value)
    return future


def echo(group, index, so_far):
    """The prompt's digits again, differently long per sample."""
    ids = unpack_ids(group.prompt_ids).tolist()[1:]
    return [*ids[: 1 + (group.id + index) % len(ids)], EOS_ID]


def reward_of_length(sample):
    return {"reward": float(len(sample.response) % 3), "exact_match": float(len(sample.response) == 2)}


def recipe(**changes):
    algorithm = {"steps": 3, "prompts_per_step": 4, "min_micro_batch_samples": 2, **changes}
    return RecipeSpec(
        model={"config": {"model_type": "qwen2"}}, algorithm=algorithm,
        sampling={"samples_per_prompt": 3, "max_new_tokens": 30},
        reward={"function": "r:score"}, evaluation={"every_steps": 0},
    )  # fmt: skip


@dataclass
class Run:
    """A run in memory, and what is left of it."""

    session: Session
    rollouts: FakeRollouts
    backend: CountingBackend
    parts: RlParts
    host: UserCodeRunner

    @classmethod
    def make(
        cls,
        folder,
        rollouts,
        spec,
        reward=reward_of_length,
        resume=None,
        environment=None,
        group_filter=None,
        timeout_s=LONG_TIMEOUT_S,
    ):
        checkpoints = Checkpoints(folder, keep=2)
        checkpoints.start()
        backend, state = CountingBackend(), TrainerState(seed=7, stage=TrainingStage.RL)
        if resume is not None:
            state = read_checkpoint(resume)
            backend.load(resume / "model")
        samples = SampleLog(folder, spec.logging.samples, seed=7)
        session = Session(state, checkpoints, MetricsLogger(folder), 1, rollouts, samples)
        rows = [DataRow(f"f:{number}", {"prompt": f"{number}=", "number": number}) for number in range(PROMPTS)]
        prompts = prepare_prompts(rows, TOKENIZER, 100)
        failures = Failures(state.results.user_code_failures, state.results.first_failures)
        scoring = RewardFunction(InlineCalls(reward), timeout_s=timeout_s, failures=failures)
        calculators = LocalConversations(CalculatorEnvironment(), LONG_TIMEOUT_S)
        episodes = Episodes(calculators, environment.max_turns, tokenizer=TOKENIZER) if environment else None
        custom_filter = (
            CustomGroupFilter(
                InlineCalls(group_filter, whole_groups=True),
                timeout_s=timeout_s,
                samples_per_group=spec.sampling.samples_per_prompt,
            )
            if group_filter
            else None
        )
        host = UserCodeRunner(rollouts, TOKENIZER, reward=scoring, episodes=episodes, group_filter=custom_filter)
        supply = GroupSupply(rollouts, host, session=session)
        parts = RlParts(
            backend=backend,
            prompts=DataBuffer([prompts], [1.0], seed=7),
            tokenizer=TOKENIZER,
            rollouts=rollouts,
            runner=host,
            supply=supply,
            versions=PolicyVersions(MemoryPublisher(), rollouts, session=session),
            evaluator=Evaluator(
                [
                    EvaluationPrompts("", prompts[:5], spec.evaluation.sampling),
                    *(EvaluationPrompts(one.name, prompts[5:8], one.sampling) for one in spec.evaluation.sets),
                ],
                spec,
                tokenizer=TOKENIZER,
                rollouts=rollouts,
                supply=supply,
                session=session,
            ),
        )
        return cls(session, rollouts, backend, parts, host)

    async def beside(self, work):
        try:
            async with asyncio.timeout(60):
                return await run_beside(work, self.host.run(), self.parts.supply.run(), self.parts.versions.run())
        finally:
            await self.session.close_saves()
            self.session.end(self.session.checkpoints.folder.parent, "done")

    async def train(self, spec):
        return await self.beside(run_rl_training(self.parts, spec, self.session))

    def prompts(self):
        """Prompt of every training submission, in order."""
        groups = [group for group in self.rollouts.submitted if group.purpose is Purpose.TRAIN]
        return [(group.id, TOKENIZER.decode(unpack_ids(group.prompt_ids).tolist())) for group in groups]
