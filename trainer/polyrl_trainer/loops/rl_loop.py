"""Reinforcement learning, one step after the other.

    publish version v ─> open the reserved window ─> submit promptsPerStep groups (and over-sampled ones)
        engines generate, user code scores                          (all the while)
        pull ─> complete groups ─> advantages ─> forward-backward       (as soon as minMicroBatchSamples are scored)
        ... until exactly a mini-batch is learned ─> one optimizer step ─> acknowledge
    surplus is cancelled and its prompts go back to the buffer ─> metrics, checkpoint, evaluation

Invariant I3: each mini-batch holds exactly miniBatchPrompts complete groups, whatever the arrival order. A step
that is abandoned (the run was asked to stop) leaves no trace: the state is that of the step's start.
"""

from __future__ import annotations

import asyncio

from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.loops.rl_step import RlParts, RlStep
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainingStage


async def run_rl_training(parts: RlParts, recipe: RecipeSpec, session: Session) -> bool:
    """Trains until `algorithm.steps` are done, from where `session.state` stands. True when done, False when stopped.

    Raises RunFailed when a step cannot be filled, DeadlineExceeded when nobody delivers.
    """
    session.enter(TrainingStage.RL)
    state, algorithm = session.state, recipe.algorithm
    if TrainingStage.RL in state.cursors:
        parts.prompts.restore(state.cursors[TrainingStage.RL])
    began_at = state.step
    while state.step < algorithm.steps and not session.stop.is_set():
        before = state.copy()
        step = RlStep(parts, recipe, session, state.step + 1, first=state.step == began_at)
        if not await step.run():
            session.state = before
            await asyncio.wrap_future(parts.backend.discard_gradients())
            await session.save(parts.backend)
            return False
        await session.end_step(parts.backend, algorithm.steps)
        await _evaluate_if_due(parts, recipe, session)
    return state.step >= algorithm.steps


async def _evaluate_if_due(parts: RlParts, recipe: RecipeSpec, session: Session) -> None:
    every = recipe.evaluation.every_steps
    state = session.state
    if parts.evaluator is not None and every and state.step % every == 0 and not state.stage_done:
        await parts.versions.ensure_published(parts.backend)
        await parts.evaluator.evaluate(state.step)
