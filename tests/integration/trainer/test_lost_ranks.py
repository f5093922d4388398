"""A rank that is killed or frozen ends its group within a bound, with a sentence, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import distributed_c10d

from polyrl.errors import GroupLost
from polyrl.testing.started import StartedProcess, words_of
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.fsdp import rank_model, ranks, sharding, start
from polyrl_trainer.backends.fsdp.heartbeat import LastHeard
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.testing.backend_conformance import MODEL, OPTIMIZER, draw_samples, exported, take_step

WAIT_SECONDS = 120.0
SILENT_S = 4.0
BOUND_S = 40.0
"""From a loss to the group's end; seconds on idle cores."""


@pytest.fixture(autouse=True)
def groups_counted_anew() -> Iterator[None]:
    """Torch counts the groups of a process, also one whose meeting failed, and the next one's names would differ from
    those that a fresh rank expects. None of ours goes on after a lost rank; this one does."""
    yield
    distributed_c10d._world.group_count = 0


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Iterator[LearnerGroup]:
    """Two ranks in the middle of their work; the timer that ends a leader which cannot end itself is left out."""
    monkeypatch.setattr(start, "_leave_in", lambda seconds, code: None)
    group = LearnerGroup(2, "cpu", threads=1, wait_seconds=WAIT_SECONDS, silent_s=SILENT_S)
    try:
        yield group
    finally:
        group.close()


LOSSES = pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (signal.SIGKILL, "rank 1 of the learner's 2 was ended by SIGKILL"),
        (signal.SIGSTOP, f"rank 1 of the learner was silent for {SILENT_S:g} s"),
    ],
    ids=["killed", "frozen"],
)


@LOSSES
def test_a_lost_rank_ends_the_group_in_time(learning: LearnerGroup, number: signal.Signals, sentence: str) -> None:
    backend = learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    take_step(backend, [draw_samples(0, 8)])
    follower = _follower(learning)

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


def test_a_rank_killed_in_a_publication_ends_the_group(learning: LearnerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the command to write its rows and the word of all that they did."""
    backend = learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    follower, export = _follower(learning), rank_model.export_rows

    def kill_and_export(*given: Any) -> None:
        ended = os.pidfd_open(follower.pid)
        follower.kill()
        # Not `wait`: how it ended is for its parent's code to see.
        assert select.select([ended], [], [], BOUND_S)[0]
        os.close(ended)
        export(*given)

    monkeypatch.setattr(rank_model, "export_rows", kill_and_export)
    with pytest.raises(GroupLost, match=r"rank 1 of the learner's 2 was ended by SIGKILL"):
        exported(backend)


def test_a_rank_killed_before_all_have_met_ends_the_group(learning: LearnerGroup) -> None:
    """The others would await it for half an hour."""
    _follower(learning).kill()
    began = time.monotonic()
    with pytest.raises(GroupLost, match=r"rank 1 of the learner's 2 was ended by SIGKILL"):
        learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    assert time.monotonic() - began < BOUND_S


def test_a_rank_frozen_before_all_have_met_ends_the_group(
    learning: LearnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others awaited it for half an hour: it lives, and its silence counted from the meeting on. Here the leader
    sees nobody come, whenever it froze."""
    monkeypatch.setattr(ranks, "PRESENT", "of nobody ")
    heard, note = threading.Event(), LastHeard.note

    def noted(self: LastHeard, *about: Any) -> None:
        note(self, *about)
        heard.set()

    monkeypatch.setattr(LastHeard, "note", noted)
    assert heard.wait(BOUND_S)
    _follower(learning).send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(GroupLost, match=f"rank 1 of the learner was silent for {SILENT_S:g} s"):
        learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    assert time.monotonic() - began < BOUND_S


@LOSSES
def test_a_rank_lost_while_the_model_is_loaded_ends_the_group_in_time(
    learning: LearnerGroup, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, sentence: str
) -> None:
    """The thread that would notice waits for the model itself."""
    cut = sharding.shard

    def lose_and_shard(*given: Any, **more: Any) -> Any:
        follower.send_signal(number)
        return cut(*given, **more)

    follower = _follower(learning)
    monkeypatch.setattr(sharding, "shard", lose_and_shard)
    began = time.monotonic()
    with pytest.raises(GroupLost, match=sentence):
        learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    assert time.monotonic() - began < BOUND_S
    follower.wait(BOUND_S)


@LOSSES
def test_a_rank_lost_while_a_checkpoint_is_read_ends_the_group_in_time(
    learning: LearnerGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, sentence: str
) -> None:
    """A run that goes on reads it on the thread that would notice: of a frozen rank it heard after half an hour."""
    load = rank_model.RankModel.load

    def lose_and_load(self: rank_model.RankModel, folder: Path) -> None:
        follower.send_signal(number)
        load(self, folder)

    backend = learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    take_step(backend, [draw_samples(0, 8)])
    backend.save(tmp_path).result(WAIT_SECONDS)
    follower = _follower(learning)
    monkeypatch.setattr(rank_model.RankModel, "load", lose_and_load)
    began = time.monotonic()
    with pytest.raises(GroupLost, match=sentence):
        backend.load(tmp_path)
    assert time.monotonic() - began < BOUND_S
    follower.wait(BOUND_S)


def test_a_group_ends_in_time_whose_pass_hangs(learning: LearnerGroup) -> None:
    """As when a run is asked to stop, and its grace is over before a frozen rank was silent for long enough: the end
    waited behind the pass, for half an hour."""
    backend = learning.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    take_step(backend, [draw_samples(0, 8)])
    follower = _follower(learning)
    follower.send_signal(signal.SIGSTOP)
    backend.forward_backward(draw_samples(0, 8), sft_loss)
    began = time.monotonic()
    learning.close()
    assert time.monotonic() - began < BOUND_S
    assert not follower.is_running()


def test_a_rank_that_dies_once_all_is_done_fails_nothing() -> None:
    """A run that had saved its last step ended with an error: its second rank was killed before it was let go."""
    group = LearnerGroup(2, "cpu", threads=1, wait_seconds=WAIT_SECONDS, silent_s=SILENT_S)
    backend = group.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    take_step(backend, [draw_samples(0, 8)])
    follower = _follower(group)
    follower.kill()
    follower.wait(BOUND_S)
    group.close()


def test_a_group_that_is_over_reads_nothing_that_others_have_opened_since() -> None:
    """Its store's end, whenever the collector comes to it, read /dev/zero for ever under the number that was closed."""
    group = LearnerGroup(1, "cpu", threads=1, wait_seconds=WAIT_SECONDS, silent_s=SILENT_S)
    backend = group.learner(replace(MODEL, dtype="float32"), EngineConfig("cpu"), OPTIMIZER)
    take_step(backend, [draw_samples(0, 8)])
    meetings = _meetings()
    group.close()
    assert _meetings() == meetings


LEADER = f"""\
import time
from dataclasses import replace
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.testing.backend_conformance import MODEL, OPTIMIZER, draw_samples, take_step

group = LearnerGroup(2, "cpu", threads=1, wait_seconds={WAIT_SECONDS}, silent_s={SILENT_S})
take_step(group.learner(MODEL, EngineConfig("cpu"), OPTIMIZER), [draw_samples(0, 8)])
print("learned", flush=True)
time.sleep({WAIT_SECONDS})
"""


def test_a_frozen_leader_ends_with_its_group(tmp_path: Path) -> None:
    """Its other ranks ended, and it stayed: nobody started the group again."""
    (tmp_path / "leader.py").write_text(LEADER)
    argv = [sys.executable, "-m", "polyrl.testing.script", str(tmp_path / "leader.py")]
    leader = StartedProcess(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    try:
        assert leader.stdout.readline() == "learned\n"
        follower = _follower_of(leader.pid)
        leader.send_signal(signal.SIGSTOP)
        errors = leader.communicate(timeout=BOUND_S)[1]
    finally:
        leader.kill()
    assert leader.returncode == -signal.SIGKILL
    assert f"the process that started this rank was silent for {SILENT_S:g} s" in errors
    assert not follower.is_running() or follower.status() == psutil.STATUS_ZOMBIE


def _meetings() -> int:
    numbers = Path("/proc/self/fd").iterdir()
    return sum("polyrl-ranks" in str(number.readlink()) for number in numbers if number.is_symlink())


def _follower(group: LearnerGroup) -> psutil.Process:
    """Whether it has its name already or not."""
    (one,) = group.followers._all
    return psutil.Process(one.process.pid)


def _follower_of(leader: int) -> psutil.Process:
    below = psutil.Process(leader).children()
    (found,) = [one for one in below if "polyrl_trainer.backends.fsdp" in words_of(one)]
    return found
