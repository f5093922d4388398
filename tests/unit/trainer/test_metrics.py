"""Which rows of metrics.jsonl a trainer leaves that goes back to a checkpoint."""

import json
from pathlib import Path

import pytest

from polyrl_trainer.metrics import MetricsLogger, kept_rows, sparsity
from polyrl_trainer.state import Results, TrainerState, TrainingStage

WHOLE = "eval0 sft1 sft2 sft3 eval3 rl1 rl2 eval2 rl3 rl4 eval4"
"""A whole run: base, SFT, afterSft, RL with an evaluation on the way, afterRl."""


def row(word: str) -> bytes:
    phase, step = word.rstrip("0123456789"), int(word[-1])
    return json.dumps({"time": 1.0, "phase": phase, "step": step, "loss": 0.5}).encode()


def rows(words: str) -> list[bytes]:
    return [row(word) for word in words.split()]


@pytest.mark.parametrize(
    ("stage", "step", "done", "kept"),
    [
        pytest.param(TrainingStage.SFT, 0, False, "", id="no checkpoint: everything is run again"),
        pytest.param(TrainingStage.SFT, 2, False, "eval0 sft1 sft2", id="in SFT"),
        pytest.param(TrainingStage.SFT, 3, True, "eval0 sft1 sft2 sft3", id="what ends a stage is evaluated again"),
        pytest.param(TrainingStage.RL, 1, False, "eval0 sft1 sft2 sft3 eval3 rl1", id="in RL"),
        pytest.param(TrainingStage.RL, 2, False, "eval0 sft1 sft2 sft3 eval3 rl1 rl2 eval2", id="evaluated on the way"),
        pytest.param(TrainingStage.RL, 4, True, "eval0 sft1 sft2 sft3 eval3 rl1 rl2 eval2 rl3 rl4", id="at its end"),
        pytest.param(TrainingStage.RL, 7, False, WHOLE, id="beyond the file"),
    ],
)
def test_what_stays(stage: TrainingStage, step: int, done: bool, kept: str) -> None:
    state = TrainerState(1, stage, step=step, stage_done=done)
    assert list(kept_rows(rows(WHOLE), state)) == rows(kept)


def test_a_run_of_one_stage() -> None:
    lines = rows("eval0 rl1 rl2 rl3")
    assert list(kept_rows(lines, TrainerState(1, TrainingStage.RL, step=2))) == lines[:3]
    assert list(kept_rows(lines, TrainerState(1, TrainingStage.RL))) == []
    assert list(kept_rows(rows("offline-rl1 offline-rl2"), TrainerState(1, TrainingStage.OFFLINE_RL, step=1))) == rows(
        "offline-rl1"
    )


def test_what_the_checkpoint_knows_is_not_evaluated_again_and_stays() -> None:
    """A run that was asked to stop in its first step of RL."""
    state = TrainerState(1, TrainingStage.RL, results=Results(evaluations={"base": {}}))
    assert list(kept_rows(rows("eval0 rl1"), state)) == rows("eval0")
    assert list(kept_rows(rows("eval0 sft1 eval1 rl1"), state)) == rows("eval0 sft1 eval1")


def test_what_was_repeated_before_is_cut_at_its_first_row() -> None:
    lines = rows("rl1 rl2 rl3 rl2 rl3")
    assert list(kept_rows(lines, TrainerState(1, TrainingStage.RL, step=2))) == rows("rl1 rl2")


def test_lines_that_are_no_rows_are_dropped() -> None:
    lines = [b"", b"{", b"[1]", b'{"phase": "rl"}', row("rl1")]
    assert list(kept_rows(lines, TrainerState(1, TrainingStage.RL, step=1))) == [row("rl1")]


@pytest.mark.parametrize(("offered", "every"), [(1, 1), (99, 1), (100, 2), (199, 2), (200, 4), (399, 4), (400, 8)])
def test_the_longer_a_run_the_sparser_its_texts(offered: int, every: int) -> None:
    assert sparsity(offered) == every


@pytest.mark.parametrize(
    ("lines", "newest"),
    [
        pytest.param(b"", None, id="no row"),
        pytest.param(row("rl1") + b"\n" + row("eval1") + b"\n", ("eval", 1), id="the last one"),
        pytest.param(row("rl1") + b"\n" + row("rl2") + b'\n{"phase": "ev', ("rl", 2), id="one that was killed over"),
    ],
)
def test_the_newest_row_is_one_of_an_earlier_process_until_there_is_another(
    tmp_path: Path, lines: bytes, newest: tuple[str, int] | None
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    logger = MetricsLogger(tmp_path)
    assert logger.newest == newest
    logger.log("sft", 3, {})
    assert logger.newest == ("sft", 3)
    logger.close()
