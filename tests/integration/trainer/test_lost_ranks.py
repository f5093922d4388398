"""A rank that is killed or frozen ends its group within a bound, with a sentence, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from polyrl.errors import GroupLost
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.fsdp import start
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.testing.backend_conformance import MODEL, OPTIMIZER, draw_samples, take_step

WAIT_SECONDS = 120.0
SILENT_S = 4.0
BOUND_S = 40.0
"""From a loss to the group's end; seconds on idle cores."""


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Iterator[LearnerGroup]:
    """Two ranks in the middle of their work; the timer that ends a leader which cannot end itself is left out."""
    monkeypatch.setattr(start, "_leave_in", lambda seconds: None)
    group = LearnerGroup(2, "cpu", threads=1, wait_seconds=WAIT_SECONDS, silent_s=SILENT_S)
    try:
        yield group
    finally:
        group.close()


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (signal.SIGKILL, "rank 1 of the learner's 2 was ended by SIGKILL"),
        (signal.SIGSTOP, f"rank 1 of the learner was silent for {SILENT_S:g} s"),
    ],
    ids=["killed", "frozen"],
)
def test_a_lost_rank_ends_the_group_in_time(learning: LearnerGroup, number: signal.Signals, sentence: str) -> None:
    backend = learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    take_step(backend, [draw_samples(0, 8)])
    (follower,) = [one for one in psutil.Process().children() if "polyrl_trainer.backends.fsdp" in one.cmdline()]

    async def lose() -> None:
        watching = asyncio.ensure_future(learning.watch())
        await asyncio.sleep(0)
        follower.send_signal(number)
        # The learner is in the middle of a pass that the other rank will never join.
        passing = asyncio.wrap_future(backend.forward_backward(draw_samples(0, 8), sft_loss))
        with pytest.raises(GroupLost, match=sentence):
            await asyncio.wait_for(watching, BOUND_S)
        with pytest.raises(GroupLost):
            await asyncio.wait_for(passing, BOUND_S)

    began = time.monotonic()
    asyncio.run(lose())
    assert time.monotonic() - began < BOUND_S
    follower.wait(BOUND_S)
    with pytest.raises(GroupLost):
        backend.log_probs(draw_samples(0, 1)).result(WAIT_SECONDS)
