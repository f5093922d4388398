"""What fits into samples.jsonl, what is thinned, and what stays when a trainer goes back to a checkpoint."""

import msgspec
import pytest

from polyrl.sample import Finish, Purpose
from polyrl.sample_record import SampleRecord, parse_records
from polyrl_trainer.sample_log.log import kept_lines, thinned
from polyrl_trainer.sample_log.texts import readable
from polyrl_trainer.state import Results, TrainerState, TrainingStage


def line(word: str) -> bytes:
    purpose, stage, step = word.split("-")
    record = SampleRecord(
        time=1.0, purpose=Purpose(purpose), stage=stage, step=int(step), sample="1.0", group=1, reward=1.0, metrics={},
        finish=Finish.STOP, versions=(0,), prompt_tokens=1, response_tokens=1, prompt="1+1=", response="2",
    )  # fmt: skip
    return msgspec.json.encode(record) + b"\n"


def words(lines: list[bytes]) -> str:
    return " ".join("-".join(map(str, record.moment)) for record in parse_records(lines))


WHOLE = "eval-sft-0 eval-sft-40 train-rl-1 train-rl-2 eval-rl-2 train-rl-3 eval-rl-3"


@pytest.mark.parametrize(
    ("stage", "step", "done", "known", "kept"),
    [
        pytest.param("sft", 0, False, "", "", id="no checkpoint: everything is run again"),
        pytest.param("sft", 20, False, "base", "eval-sft-0", id="in SFT"),
        pytest.param("sft", 40, True, "base", "eval-sft-0", id="what ends a stage is evaluated again"),
        pytest.param("rl", 0, False, "base afterSft", "eval-sft-0 eval-sft-40", id="stopped in RL's first step"),
        pytest.param("rl", 1, False, "base", "eval-sft-0 eval-sft-40 train-rl-1", id="in RL"),
        pytest.param("rl", 2, False, "base", WHOLE[: WHOLE.index(" train-rl-3")], id="evaluated on the way"),
        pytest.param("rl", 3, True, "base", WHOLE[: WHOLE.index(" eval-rl-3")], id="at its end"),
    ],
)
def test_what_stays(stage: str, step: int, done: bool, known: str, kept: str) -> None:
    results = Results(evaluations={moment: {} for moment in known.split()})
    state = TrainerState(1, TrainingStage(stage), step=step, stage_done=done, results=results)
    assert words(list(kept_lines(map(line, WHOLE.split()), state, evaluated=True))) == kept


def test_texts_without_their_numbers_are_dropped_for_the_evaluation_is_done_again() -> None:
    state = TrainerState(1, TrainingStage.RL, step=2)
    assert "eval-rl-2" not in words(list(kept_lines(map(line, WHOLE.split()), state, evaluated=False)))


@pytest.mark.parametrize("known", ["", "base"])
def test_the_first_evaluation_of_rl_alone_is_done_again_unless_it_is_known(known: str) -> None:
    state = TrainerState(1, TrainingStage.RL, results=Results(evaluations={at: {} for at in known.split()}))
    assert len(list(kept_lines([line("eval-rl-0")], state, evaluated=True))) == len(known.split())


def test_a_line_that_a_writer_was_killed_over_is_dropped() -> None:
    state = TrainerState(1, TrainingStage.RL, step=3)
    whole = line("train-rl-1")
    assert list(kept_lines([whole, whole[:20], b"\xff\xfe\n", b"[1]\n", b"\n"], state, evaluated=True)) == [whole]


def test_what_does_not_fit_is_thinned_from_the_old_end() -> None:
    lines = [line(f"train-rl-{step}") for step in range(1, 10) for _ in range(2)]
    size = 2 * len(lines[0])
    assert thinned(lines, 9 * size) == lines
    assert words(thinned(lines, 6 * size)).split()[::2] == [f"train-rl-{step}" for step in (1, 3, 5, 7, 9)]
    assert words(thinned(lines, 3 * size)).split()[::2] == ["train-rl-1", "train-rl-5", "train-rl-9"]
    assert words(thinned(lines, 1)).split() == ["train-rl-9"] * 2


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param("12345678", "12345678", id="fits"),
        pytest.param("1234abcd5678", "1234 […4 characters left out…] 5678", id="the middle is left out"),
        pytest.param("\ud800!", "\\ud800!", id="half a surrogate pair"),
        pytest.param("\x1b[2J\0", "\x1b[2J\0", id="control characters are data; who prints them makes them harmless"),
    ],
)
def test_texts(text: str, kept: str) -> None:
    assert readable(text, 8) == kept
    msgspec.json.encode(readable(text, 8))
