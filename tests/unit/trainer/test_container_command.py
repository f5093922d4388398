"""What a trainer's container runs: the commands, what agents see, when they are started again."""

from __future__ import annotations

import pytest

from polyrl.errors import UserError
from polyrl_trainer.container.command import SETTLED_S, Restarts, exit_status, parse_command

ARGV = "--engines 2 --gpus-each 2 --threads 3 -- python -m agent --engine-name pod.{engine} -- python -m trainer -r r"


def test_commands_are_apart_and_each_engine_has_its_number() -> None:
    command = parse_command(ARGV.split())
    assert command.trainer == ("python", "-m", "trainer", "-r", "r")
    assert command.agent_command(1) == ["python", "-m", "agent", "--engine-name", "pod.1"]
    assert (command.engines, command.gpus_each, command.threads) == (2, 2, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("", id="nothing"),
        pytest.param("--engines 2 --gpus-each 1 --threads 1 -- agent", id="no trainer"),
        pytest.param("--engines 2 --gpus-each 1 --threads 1 -- -- trainer", id="no agent"),
        pytest.param("--engines 2 -- agent -- trainer", id="a number too few"),
        pytest.param("--engines two --gpus-each 1 --threads 1 -- agent -- trainer", id="no number"),
    ],
)
def test_a_wrong_command_line_is_refused(wrong: str) -> None:
    with pytest.raises(UserError, match="give"):
        parse_command(wrong.split())


@pytest.mark.parametrize(
    ("number", "visible", "seen"),
    [
        pytest.param(0, None, "0,1", id="the first two of all"),
        pytest.param(1, None, "2,3", id="the next two"),
        pytest.param(1, "GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d", id="of those that the container names"),
    ],
)
def test_each_engine_sees_its_own_gpus(number: int, visible: str | None, seen: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert parse_command(ARGV.split()).agent_environment(number, environ)["CUDA_VISIBLE_DEVICES"] == seen


def test_one_engine_without_a_number_of_gpus_sees_whatever_there_is() -> None:
    command = parse_command(ARGV.replace("--gpus-each 2", "--gpus-each 0").split())
    assert "CUDA_VISIBLE_DEVICES" not in command.agent_environment(0, {})
    assert command.agent_environment(0, {"CUDA_VISIBLE_DEVICES": "7"})["CUDA_VISIBLE_DEVICES"] == "7"


def test_an_engine_gets_nothing_of_the_users_accounts() -> None:
    environ = {
        "PATH": "p",
        "HF_TOKEN": "t",
        "JUDGE_API_KEY": "k",
        "OWN": "o",
        "NCCL_DEBUG": "n",
        "OMP_NUM_THREADS": "8",
    }
    assert parse_command(ARGV.split()).agent_environment(0, environ) == {
        "PATH": "p",
        "NCCL_DEBUG": "n",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }


def test_an_agent_is_started_again_ever_later_and_anew_after_a_long_life() -> None:
    restarts, pauses = Restarts(), []
    for _ in range(7):
        restarts = restarts.after(5.0)
        pauses.append(restarts.pause_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert restarts.after(SETTLED_S).pause_s == 1


def test_a_container_ends_as_its_trainer_did() -> None:
    assert [exit_status(code) for code in (0, 1, 143, -9, -15)] == [0, 1, 143, 137, 143]
