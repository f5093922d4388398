"""Supervised fine-tuning: one optimizer step a batch, on its mean loss per learned token, however it is split."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from polyrl.manifest.recipe import SftSpec
from polyrl_trainer.backend import StepResult, TrainingBackend
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.sample import Sample
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainingStage


async def run_sft_training(
    backend: TrainingBackend,
    data: DataBuffer[Sample],
    sft: SftSpec,
    *,
    session: Session,
    after_step: Callable[[], Awaitable[None]],
) -> bool:
    """Trains until `sft.steps` are done; resumes where `session.state` stands. True when done, False when stopped."""
    session.enter(TrainingStage.SFT, data)
    state = session.state
    while state.step < sft.steps and not session.stop.is_set():
        started = time.monotonic()
        batch = [draw.item for draw in data.get(sft.batch_size)]
        sums = await asyncio.wrap_future(backend.forward_backward(batch, sft_loss))
        result = await asyncio.wrap_future(backend.optim_step(normalizer=sums["tokens"]))
        state.results.count_optimizer_step(taken=not result.not_finite)
        state.results.train_seconds += time.monotonic() - started
        state.finish_step(data.state(), sums)
        values = step_values(sums, result, data.epochs(), time.monotonic() - started)
        await session.report(state.step, {"sft/loss": sums["loss"] / sums["tokens"], **values})
        await session.end_step(backend, sft.steps)
        await after_step()
    await session.leave(backend, sft.steps)
    return state.step >= sft.steps


def step_values(sums: dict[str, float], result: StepResult, epochs: float, seconds: float) -> dict[str, float]:
    """What is said of every step on rows of a file; `sums` are the backend's."""
    entropy = {"actor/entropy": sums["entropy"] / sums["tokens"]} if "entropy" in sums else {}
    return {
        **entropy,
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.learning_rate,
        "actor/skipped_steps": float(bool(result.not_finite)),
        "data/epochs": epochs,
        "perf/padding_fraction": sums["padding_fraction"],
        "perf/throughput": sums["tokens"] / max(seconds, 1e-9),
        "timing_s/step": seconds,
    }
