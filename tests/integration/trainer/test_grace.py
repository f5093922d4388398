"""Saves beside the steps of a trainer, and what it saves when it is asked to stop: what fits into its grace, by how
fast earlier saves were; and it reports what is saved, and why not more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from polyrl.errors import CannotGoOn, DeadlineExceeded, DiskRefused, InvalidData, UserError
from polyrl.worker import TRAINER_END_S
from polyrl_trainer import app
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.checkpoints import Checkpoints, complete_checkpoints, read_checkpoint
from polyrl_trainer.checkpoints.writer import Writer
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainerState, TrainingStage

WAIT_S = 20.0
MIB = 1 << 20
MakeSession = Callable[[float], Session]
"""From a grace."""


class SlowDisk:
    """A learner whose save is over when the test lets it be."""

    def __init__(self) -> None:
        self.size = MIB
        self.free = threading.Event()
        self.free.set()
        self.refuses = False
        self.copied: list[bool] = []
        self._writer = Writer("disk")

    def save(self, folder: Path, *, copied: bool) -> Future[None]:
        self.copied.append(copied)
        return self._writer.submit(lambda: self._write(folder))

    def state_bytes(self) -> int:
        return self.size

    def _write(self, folder: Path) -> None:
        assert self.free.wait(WAIT_S)
        if self.refuses:
            raise OSError("disk full")
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
    return Session(state, checkpoints, MetricsLogger(folder), checkpoint_every_steps=2, grace_s=grace_s)


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


def backend(disk: SlowDisk) -> TrainingBackend:
    return disk  # type: ignore[return-value]


async def step(one: Session, disk: SlowDisk, number: int, total: int = 99) -> None:
    one.state.step = number
    await one.end_step(backend(disk), total)


def saved(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder / "checkpoints")]


async def test_steps_go_on_while_the_disk_is_slow_and_one_save_is_in_flight_at_a_time(
    tmp_path: Path, session: MakeSession, disk: SlowDisk
) -> None:
    one = session(WAIT_S)
    disk.free.clear()
    await step(one, disk, 2)
    await step(one, disk, 3)
    assert saved(tmp_path) == []
    next_save = asyncio.ensure_future(step(one, disk, 4))
    await asyncio.sleep(0.05)
    assert not next_save.done(), "the second waits for the first"
    disk.free.set()
    await next_save
    await one.saves.settle()
    assert saved(tmp_path) == ["sft-step-000002", "sft-step-000004"]
    assert read_checkpoint(tmp_path / "checkpoints" / "sft-step-000002").step == 2, "the state as it was"
    values = one.saves.take_metrics()
    assert values["timing_s/save_checkpoint"] >= 0.05
    assert values["timing_s/checkpoint"] > 0
    assert one.saves.take_metrics() == {}


class Manager:
    """As far as checkpoints know it: `covered` has what lay on the disk at each message, and the message."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.acknowledged = [(0, 1)]
        self.covered: list[tuple[list[str], list[tuple[int, int]]]] = []

    def cover(self, batches: Sequence[tuple[int, int]]) -> None:
        self.covered.append((saved(self.folder), list(batches)))


async def test_batches_are_covered_when_they_are_durable_and_not_before(
    tmp_path: Path, session: MakeSession, disk: SlowDisk
) -> None:
    """What is covered, the manager forgets."""
    one, manager = session(WAIT_S), Manager(tmp_path)
    one.rollouts = manager  # type: ignore[assignment]
    disk.free.clear()
    await step(one, disk, 2)
    manager.acknowledged = [(0, 5)]
    await step(one, disk, 3)
    await asyncio.sleep(0.02)
    assert manager.covered == []
    disk.free.set()
    await one.saves.settle()
    assert manager.covered == [(["sft-step-000002"], [(0, 1)])], "what was in the copy, and no more"


async def test_a_failed_save_ends_the_run_and_covers_nothing(
    tmp_path: Path, session: MakeSession, disk: SlowDisk
) -> None:
    one = session(WAIT_S)
    watching = asyncio.ensure_future(one.saves.watch())
    disk.refuses = True
    await step(one, disk, 2)
    with pytest.raises(DiskRefused, match="disk full"):
        async with asyncio.timeout(WAIT_S):
            await watching
    disk.refuses = False
    with pytest.raises(DiskRefused, match="disk full"):
        await step(one, disk, 4)
    assert saved(tmp_path) == []
    assert "nothing is saved: the save failed: " in one.what_is_saved()
    assert "sft-step-000002: cannot be written: disk full; " in one.what_is_saved()
    await one.close_saves()


async def test_a_stage_ends_and_a_run_ends_with_what_was_in_flight(
    tmp_path: Path, session: MakeSession, disk: SlowDisk
) -> None:
    one = session(WAIT_S)
    disk.free.clear()
    ending = asyncio.ensure_future(step(one, disk, 9, total=9))
    await asyncio.sleep(0.02)
    assert not ending.done()
    disk.free.set()
    await ending
    assert saved(tmp_path) == ["sft-step-000009"], "the next stage begins with it"
    disk.free.clear()
    await step(one, disk, 10)
    closing = asyncio.ensure_future(one.close_saves())
    await asyncio.sleep(0.02)
    assert not closing.done()
    disk.free.set()
    await closing
    assert saved(tmp_path) == ["sft-step-000009", "sft-step-000010"]


async def test_a_save_that_does_not_end_has_a_deadline(session: MakeSession, disk: SlowDisk) -> None:
    one = session(0.05)
    disk.free.clear()
    await step(one, disk, 2)
    with pytest.raises(DeadlineExceeded, match="the last save to be written"):
        await one.saves.settle(0.01)
    one.ask_to_stop()
    async with asyncio.timeout(WAIT_S):
        await one.close_saves()
    assert one.what_is_saved().startswith("nothing is saved: sft-step-000002 is still written, after 0.")
    disk.free.set()


async def test_what_fits_into_the_grace_is_saved(tmp_path: Path, session: MakeSession, disk: SlowDisk) -> None:
    one = session(WAIT_S)
    await step(one, disk, 2)
    one.ask_to_stop()
    await step(one, disk, 7)
    assert saved(tmp_path) == ["sft-step-000002", "sft-step-000007"]
    assert one.what_is_saved() == "sft-step-000007 is saved"


async def test_one_in_flight_counts_and_what_does_not_fit_after_it_is_not_begun(
    tmp_path: Path, session: MakeSession, disk: SlowDisk
) -> None:
    """A hundred times the bytes of the save in flight take a hundred times as long, and the grace has not so much."""
    one = session(2.0)
    disk.free.clear()
    await step(one, disk, 2)
    one.ask_to_stop()
    disk.size *= 100
    stopping = asyncio.ensure_future(step(one, disk, 7))
    await asyncio.sleep(0.1)
    disk.free.set()
    await stopping
    assert saved(tmp_path) == ["sft-step-000002"]
    words = one.what_is_saved()
    assert words.startswith("sft-step-000002 is saved, and nothing after it up to sft-step-000007: a save of 100.0 MiB")
    assert words.endswith("s were left")


async def test_a_part_of_a_step_that_does_not_fit_is_not_said_to_be_saved(session: MakeSession, disk: SlowDisk) -> None:
    one = session(2.0)
    await step(one, disk, 2)
    await one.saves.settle()
    one.ask_to_stop()
    one.leave_by = 0.0
    one.state.trained_groups, disk.size = 4, disk.size * 100
    await one.save(backend(disk))
    assert one.what_is_saved().startswith(
        "sft-step-000002 is saved, and nothing after it up to sft-step-000002-and-000004-groups: a save of 100.0 MiB"
    )
    one.enter(TrainingStage.RL)
    one.state.trained_groups = 4
    rest = ", and nothing after it up to rl-step-000000-and-000004-groups"
    assert one.what_is_saved().startswith(f"sft-step-000002 is saved{rest}: "), "the stage after it"
    one.state.trained_groups = 0
    assert one.what_is_saved().startswith("sft-step-000002 is saved: "), "in which nothing is learned"


async def test_what_is_saved_already_is_not_saved_again(
    tmp_path: Path, session: MakeSession, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = session(WAIT_S)
    await step(one, disk, 2)
    await one.saves.settle()
    monkeypatch.setattr(disk, "save", None)
    one.ask_to_stop()
    await one.save(backend(disk))
    assert one.what_is_saved() == "sft-step-000002 is saved"


async def test_without_any_checkpoint_or_at_a_stages_end_it_is_tried_all_the_same(
    tmp_path: Path, session: MakeSession, disk: SlowDisk
) -> None:
    one = session(0.0)
    one.ask_to_stop()
    await step(one, disk, 3)
    assert saved(tmp_path) == ["sft-step-000003"]
    await step(one, disk, 9, total=9)
    assert saved(tmp_path) == ["sft-step-000003", "sft-step-000009"], "a run that is done has its end"


async def test_the_grace_begins_once(session: MakeSession) -> None:
    one = session(5.0)
    assert one.what_is_saved() == "nothing is saved"
    one.ask_to_stop()
    first = one.leave_by
    await asyncio.sleep(0.01)
    one.ask_to_stop()
    assert one.leave_by == first


def test_a_manager_that_answers_nobody_leaves_time_for_the_result() -> None:
    """It was awaited until the trainer was ended by force: no steps in the summary, and no last words."""
    assert app.FINISH_DEADLINE_S <= TRAINER_END_S / 2


async def test_a_manager_that_hears_no_goodbye_keeps_no_stopped_trainer(
    tmp_path: Path, session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was awaited until the trainer was ended by force: what sinks had not taken was lost, and its last words."""
    monkeypatch.setattr("polyrl_trainer.session.LAST_ANSWER_S", 0.1)
    one, side = session(15.0), MagicMock()
    side.finish = lambda *_: asyncio.sleep(3600)

    @asynccontextmanager
    async def given(*_: object, **__: object) -> AsyncIterator[MagicMock]:
        yield side

    async def stopped(*_: object) -> bool:
        one.ask_to_stop()
        return False

    for name, double in {"_client": given, "_rollout_side": given, "_until_left": stopped}.items():
        monkeypatch.setattr(app, name, double)
    arguments: Any = SimpleNamespace(run=tmp_path, hand_over=False, manager_endpoints=tmp_path)
    nothing: Any = MagicMock()
    async with asyncio.timeout(WAIT_S):
        assert not await app._run_stages(arguments, nothing, nothing, nothing, session=one, stages=nothing)
    assert '"outcome": "stopped"' in (tmp_path / "trainer-result.json").read_text()


@pytest.mark.parametrize("learned", [0, 40], ids=["nothing is learned yet", "something is learned"])
async def test_a_fault_of_the_input_leaves_what_is_saved_to_another_edit(
    tmp_path: Path, session: MakeSession, disk: SlowDisk, learned: int
) -> None:
    """An image that could not read the checkpoint ended the job for ever, and at the manager the run as well."""
    one = session(WAIT_S)
    await step(one, disk, 2)
    one.saves_beside_steps = False
    await step(one, disk, 4)

    async def main() -> bool:
        one.state.results.tokens_trained += learned
        raise InvalidData("format version 9, this release reads 3")

    arguments: Any = SimpleNamespace(run=tmp_path, store="", hand_over=True)
    stages: Any = SimpleNamespace(session=one, learners=SimpleNamespace(watch=lambda: asyncio.sleep(3600)))
    with pytest.raises(UserError, match="format version 9") as raised:
        await app._until_left(arguments, stages, main())
    assert type(raised.value) is (InvalidData if learned else CannotGoOn)
    assert app._is_temporary(raised.value) is not bool(learned)


async def test_whoever_waits_for_the_disk_in_any_case_copies_nothing(
    tmp_path: Path, session: MakeSession, disk: SlowDisk
) -> None:
    one = session(WAIT_S)
    await step(one, disk, 2)
    one.saves_beside_steps = False
    await step(one, disk, 4)
    assert saved(tmp_path) == ["sft-step-000002", "sft-step-000004"], "and it has waited"
    one.saves_beside_steps = True
    await step(one, disk, 6, total=6)
    one.ask_to_stop()
    await step(one, disk, 7)
    assert disk.copied == [True, False, False, False]
    assert saved(tmp_path)[-2:] == ["sft-step-000006", "sft-step-000007"]
