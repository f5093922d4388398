"""Ranks killed at random instants; 50 by `python benchmarks/ranks/run.py`, and another number of ranks after it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyrl.errors import DiskRefused
from polyrl.testing.started import ran, words_of
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.backends import training_state
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learner
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.testing.backend_conformance import (
    MODEL,
    OPTIMIZER,
    assert_weights_equal,
    draw_samples,
    exported,
    take_step,
)
from polyrl_trainer.testing.fsdp_group import WAIT_SECONDS, group

RANKS = Path(__file__).parents[3] / "benchmarks" / "ranks" / "run.py"


def learner(ranks: LearnerGroup) -> Learner:
    return ranks.learner(MODEL, EngineConfig("cpu"), OPTIMIZER)


@pytest.mark.slow
def test_killed_ranks_leave_nobody_and_change_nothing() -> None:
    """The second kill of this seed hits the leader."""
    command = [sys.executable, "-m", "polyrl.testing.script", str(RANKS), "--kills", "2", "--seed", "2"]
    done = ran(command, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the leader" in done.stdout
    assert "rank 1" in done.stdout
    assert "all ended equal" in done.stdout


def test_three_ranks_go_on_where_two_were(tmp_path: Path) -> None:
    """With the optimizer's moments: what they save at once is what they read, to the bit."""
    folders = [tmp_path / name for name in ("of-two", "of-three")]
    for folder in folders:
        folder.mkdir()
    with group(2) as two:
        first = learner(two)
        for step in range(3):
            take_step(first, [draw_samples(step, 9)])
        first.save(folders[0]).result(WAIT_SECONDS)
        weights, wanted = exported(first), take_step(first, [draw_samples(7, 9)])
    with group(3) as three:
        second = learner(three)
        second.load(folders[0])
        assert_weights_equal(exported(second), weights, "from two ranks to three")
        second.save(folders[1]).result(WAIT_SECONDS)
        found = take_step(second, [draw_samples(7, 9)])
    assert found == pytest.approx(wanted, abs=1e-5)
    moments = [load_file(folder / "optimizer.safetensors") for folder in folders]
    assert moments[0].keys() == moments[1].keys()
    assert all(torch.equal(tensor, moments[1][name]) for name, tensor in moments[0].items())


@pytest.fixture(scope="module")
def two() -> Iterator[LearnerGroup]:
    """For all tests below, none of which may cost the group: this process leads no other at the same time."""
    with group(2) as made:
        yield made


def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks_and_named(two: LearnerGroup) -> None:
    def not_finite(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        loss, sums = sft_loss(inputs)
        return loss * float("nan"), sums

    backend = learner(two)
    take_step(backend, [draw_samples(0, 8)])
    before = exported(backend)
    sums = backend.forward_backward(draw_samples(1, 8), not_finite).result(WAIT_SECONDS)
    taken = backend.optim_step(sums["tokens"]).result(WAIT_SECONDS)
    assert taken.not_finite
    assert_weights_equal(exported(backend), before, "a step that was skipped")
    assert np.isfinite(take_step(backend, [draw_samples(2, 8)])), "and the group goes on"


def test_a_full_disk_of_a_follower_fails_the_save_everywhere_and_the_group_lives_on(
    two: LearnerGroup, tmp_path: Path
) -> None:
    """A limit of its files' size stands in for the disk."""
    backend = learner(two)
    take_step(backend, [draw_samples(0, 8)])
    (follower,) = [one for one in psutil.Process().children() if "polyrl_trainer.backends.fsdp" in words_of(one)]
    limits = resource.prlimit(follower.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(follower.pid, resource.RLIMIT_FSIZE, (1024, limits[1]))
    (tmp_path / "full").mkdir()
    with pytest.raises(DiskRefused, match=r"^rank 1 of the learner: .*safetensors: cannot be written: "):
        backend.save(tmp_path / "full").result(WAIT_SECONDS)
    resource.prlimit(follower.pid, resource.RLIMIT_FSIZE, limits)
    (tmp_path / "room").mkdir()
    backend.save(tmp_path / "room").result(WAIT_SECONDS)
    before = exported(backend)
    backend.load(tmp_path / "room")
    assert_weights_equal(exported(backend), before, "saved after there was room")


def test_a_disk_that_is_full_at_the_last_tensors_fails_the_save_and_the_group_lives_on(
    two: LearnerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group counted as lost, and was started again on the same disk: nobody heard from the leader of what
    safetensors raises for a full one."""
    save = training_state.save_file

    def refuse(*given: Any, **more: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    backend = learner(two)
    take_step(backend, [draw_samples(0, 8)])
    monkeypatch.setattr(training_state, "save_file", refuse)
    (tmp_path / "full").mkdir()
    with pytest.raises(
        DiskRefused, match=r"rng\.safetensors: cannot be written: .*No space left.*; make room on its disk"
    ):
        backend.save(tmp_path / "full").result(WAIT_SECONDS)
    monkeypatch.setattr(training_state, "save_file", save)
    (tmp_path / "room").mkdir()
    backend.save(tmp_path / "room").result(WAIT_SECONDS)
