"""One life of a learner of several ranks: goes on from the folder's newest checkpoint, prints a line after each step.

python rank_run.py FOLDER --ranks 2 --steps 10   ends with 0 when all steps are done, 75 when it lost a rank

It is started, watched and saved as the trainer does it (`LearnerGroup`, `Checkpoints`), on batches that the step's
number draws.
"""

from __future__ import annotations

import argparse
import asyncio
from concurrent.futures import Future
from pathlib import Path

from polyrl import interpreter, parent_death_signal
from polyrl.errors import GroupLost
from polyrl.worker import TEMPORARY_EXIT
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.checkpoints import Checkpoints, read_checkpoint
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.session import run_beside
from polyrl_trainer.state import TrainerState, TrainingStage
from polyrl_trainer.testing.backend_conformance import MODEL, OPTIMIZER, draw_samples

SAVE_EVERY = 2
SAMPLES = 8
WAIT_SECONDS = 120.0


async def learn(group: LearnerGroup, folder: Path, steps: int) -> None:
    """To the last step, each reported once it is taken, and its save's end."""
    checkpoints = Checkpoints(folder, keep=2)
    await asyncio.to_thread(checkpoints.start)
    backend = await asyncio.to_thread(group.learner, MODEL, EngineConfig("cpu"), OPTIMIZER)
    state, newest = TrainerState(seed=1, stage=TrainingStage.SFT), checkpoints.newest()
    if newest is not None:
        state = read_checkpoint(newest)
        await asyncio.to_thread(backend.load, newest / "model")
    written: Future[Path] | None = None
    while state.step < steps:
        sums = await asyncio.wrap_future(backend.forward_backward(draw_samples(state.step, SAMPLES), sft_loss))
        await asyncio.wrap_future(backend.optim_step(sums["tokens"]))
        state.step += 1
        if state.step % SAVE_EVERY == 0 or state.step == steps:
            if written is not None:
                await asyncio.wrap_future(written)
            written = await asyncio.to_thread(checkpoints.save, state.copy(), backend)
        print(f"step {state.step}", flush=True)
    if written is not None:
        await asyncio.wrap_future(written)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    parent_death_signal.hold()
    group = LearnerGroup(asked.ranks, "cpu", threads=1, wait_seconds=WAIT_SECONDS)
    code = 0
    try:
        asyncio.run(run_beside(learn(group, asked.folder, asked.steps), group.watch()))
    except GroupLost as lost:
        print(f"lost: {lost}", flush=True)
        code = TEMPORARY_EXIT
    finally:
        group.close()
    return code


if __name__ == "__main__":
    with interpreter.prompt_exit():
        raise SystemExit(main())
