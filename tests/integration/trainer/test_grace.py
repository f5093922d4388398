"""A trainer that is asked to stop saves what fits into its grace, by how long its last save took, and reports what is
saved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.checkpoints import Checkpoints, complete_checkpoints, why_not_begun
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainerState, TrainingStage

SAVE_S = 0.4
MakeSession = Callable[[float], Session]
"""From a grace."""


@pytest.mark.parametrize(
    ("left", "took", "begun"),
    [(None, 99.0, True), (1.0, None, True), (10.0, 8.0, True), (9.9, 8.0, False), (-1.0, 0.1, False)],
    ids=["nobody asked", "not known", "just in time", "just too late", "over"],
)
def test_a_save_is_begun_where_it_fits(left: float | None, took: float | None, begun: bool) -> None:
    assert (why_not_begun(left, took) == "") is begun


class SlowDisk:
    """A learner whose save takes its time."""

    def save(self, folder: Path) -> None:
        time.sleep(SAVE_S)
        (folder / "weights").write_bytes(b"w")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[MakeSession]:
    made: list[Session] = []

    def make(grace_s: float) -> Session:
        made.append(session_in(tmp_path, grace_s))
        return made[-1]

    yield make
    for one in made:
        one.metrics.close()


def session_in(folder: Path, grace_s: float) -> Session:
    checkpoints = Checkpoints(folder, keep=9)
    checkpoints.start()
    state = TrainerState(seed=1, stage=TrainingStage.SFT)
    return Session(state, checkpoints, MetricsLogger(folder), checkpoint_every_steps=1000, grace_s=grace_s)


async def step(one: Session, backend: TrainingBackend, number: int, total: int = 99) -> None:
    one.state.step = number
    await one.end_step(backend, total)


def saved(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder / "checkpoints")]


@pytest.fixture
def backend() -> TrainingBackend:
    return SlowDisk()  # type: ignore[return-value]


async def test_what_fits_into_the_grace_is_saved(
    tmp_path: Path, session: MakeSession, backend: TrainingBackend
) -> None:
    one = session(10 * SAVE_S)
    await one.save(backend)
    one.ask_to_stop()
    await step(one, backend, 7)
    assert saved(tmp_path) == ["sft-step-000000", "sft-step-000007"]
    assert one.what_is_saved() == "sft-step-000007 is saved"


async def test_what_does_not_fit_is_not_begun_and_that_is_reported(
    tmp_path: Path, session: MakeSession, backend: TrainingBackend
) -> None:
    one = session(SAVE_S / 2)
    await one.save(backend)
    one.ask_to_stop()
    began = time.monotonic()
    await step(one, backend, 7)
    assert time.monotonic() - began < SAVE_S / 2, "nothing was begun"
    assert saved(tmp_path) == ["sft-step-000000"]
    words = one.what_is_saved()
    assert words.startswith("sft-step-000000 is saved, and nothing after it up to sft-step-000007: a save takes 0.")
    assert words.endswith("s were left")


async def test_without_any_checkpoint_or_at_a_stages_end_it_is_tried_all_the_same(
    tmp_path: Path, session: MakeSession, backend: TrainingBackend
) -> None:
    one = session(0.0)
    one.ask_to_stop()
    await step(one, backend, 3)
    assert saved(tmp_path) == ["sft-step-000003"]
    await step(one, backend, 9, total=9)
    assert saved(tmp_path) == ["sft-step-000003", "sft-step-000009"], "a run that is done has its end"


async def test_the_grace_begins_once(session: MakeSession) -> None:
    one = session(5.0)
    assert one.what_is_saved() == "nothing is saved"
    one.ask_to_stop()
    first = one.leave_by
    await asyncio.sleep(0.01)
    one.ask_to_stop()
    assert one.leave_by == first
