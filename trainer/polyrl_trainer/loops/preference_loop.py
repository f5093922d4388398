"""Learning from pairs of answers: DPO against a frozen reference, and the reward model; one optimizer step a batch.

The reference scores each batch when it is drawn: exact wherever a run is resumed, and nothing is to be kept of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from polyrl.manifest.parts.optimizer import OptimizerSpec
from polyrl.manifest.recipe import Mode, RecipeSpec
from polyrl_trainer.backend import Loss, TrainingBackend
from polyrl_trainer.backends.policy import ReferenceScores, with_reference
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.preferences import AnswerPair
from polyrl_trainer.loops.sft_loop import step_values
from polyrl_trainer.losses.preferences import dpo_loss, reward_model_loss
from polyrl_trainer.losses.sft import COUNTS, MAX_SUFFIX
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainingStage

TEMPERATURE = 1.0
"""Nothing was sampled."""
NOT_OF_PAIRS = COUNTS | {"padding_fraction", "entropy"}
"""Sums that make no mean over pairs; of the loss it is made apart."""


@dataclass(frozen=True)
class PreferenceStage:
    """What the two modes have different."""

    stage: TrainingStage
    steps: int
    batch_size: int
    optimizer: OptimizerSpec
    loss: Loss
    loss_name: str
    """In metrics."""

    @classmethod
    def of(cls, recipe: RecipeSpec) -> PreferenceStage:
        """By the recipe's mode, `dpo` or `reward-model`."""
        if recipe.mode is Mode.DPO:
            dpo = recipe.dpo
            loss = partial(dpo_loss, dpo=dpo)
            return cls(TrainingStage.DPO, dpo.steps, dpo.batch_size, dpo.optimizer, loss=loss, loss_name="dpo/loss")
        model = recipe.reward_model
        of_model = partial(reward_model_loss, model=model)
        stage = TrainingStage.REWARD_MODEL
        return cls(stage, model.steps, model.batch_size, model.optimizer, loss=of_model, loss_name="rm/loss")


async def run_preference_training(
    backend: TrainingBackend,
    pairs: DataBuffer[AnswerPair],
    stage: PreferenceStage,
    *,
    session: Session,
    reference: ReferenceScores | None,
) -> bool:
    """Trains until the stage's steps are done; resumes where `session.state` stands. True when done, False when
    stopped."""
    session.enter(stage.stage, pairs)
    state = session.state
    while state.step < stage.steps and not session.stop.is_set():
        started = time.monotonic()
        answers = [answer for draw in pairs.get(stage.batch_size) for answer in draw.item]
        answers = await with_reference(answers, reference, TEMPERATURE)
        sums = await asyncio.wrap_future(backend.forward_backward(answers, stage.loss, TEMPERATURE, together=2))
        result = await asyncio.wrap_future(backend.optim_step(normalizer=float(stage.batch_size)))
        seconds = time.monotonic() - started
        state.results.count_optimizer_step(taken=not result.not_finite)
        state.results.train_seconds += seconds
        state.finish_step(pairs.state(), sums)
        values = step_values(sums, result, pairs.epochs(), seconds)
        await session.report(state.step, {**_of_pairs(sums, stage), **values})
        await session.end_step(backend, stage.steps)
    await session.leave(backend, stage.steps)
    return state.step >= stage.steps


def _of_pairs(sums: Mapping[str, float], stage: PreferenceStage) -> dict[str, float]:
    of_loss = {name: sums[name] for name in sums if name not in NOT_OF_PAIRS and not name.endswith(MAX_SUFFIX)}
    return {name: value / stage.batch_size for name, value in {stage.loss_name: sums["loss"], **of_loss}.items()}
