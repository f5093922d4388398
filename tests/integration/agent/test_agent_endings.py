"""How the agent's process ends: with its parent, at once on wrong input, and the same signal works for any program."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyrl.parent_death_signal import PARENT_PID
from polyrl_operator.secret import write_run_keys
from polyrl_rollout import exec_with_parent_death_signal
from polyrl_rollout.exec_with_parent_death_signal import EXIT_NOT_FOUND

DEADLINE_S = 60.0
PARENT = f"""
import os, subprocess, sys
child = [sys.executable, "-m", "{exec_with_parent_death_signal.__name__}", "--", "sh", "-c", "echo $$; exec sleep 600"]
subprocess.run(child, env={{**os.environ, "{PARENT_PID}": str(os.getpid())}})
"""


async def test_a_program_with_a_parent_death_signal_ends_when_its_parent_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await asyncio.wait_for(parent.stdout.readline(), DEADLINE_S))
    os.kill(child, 0)
    parent.kill()
    await parent.wait()
    # The pipe closes when the last process that holds it, the child, is gone.
    assert await asyncio.wait_for(parent.stdout.read(), DEADLINE_S) == b""


def test_a_program_whose_parent_is_gone_already_is_not_started() -> None:
    env = {**os.environ, PARENT_PID: "1"}
    argv = [sys.executable, "-m", "polyrl_rollout.exec_with_parent_death_signal", "--", "echo", "started"]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""


def test_a_program_that_does_not_exist() -> None:
    argv = [sys.executable, "-m", "polyrl_rollout.exec_with_parent_death_signal", "--", "no-such-program"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == EXIT_NOT_FOUND
    assert ended.stderr == "no-such-program: No such file or directory\n"


@pytest.mark.parametrize(
    ("job", "words"),
    [(None, "job.json: cannot read the job: No such file"), ("{}", "job.json: apiVersion: Field required")],
)
def test_wrong_files_end_the_agent_with_one_sentence(tmp_path: Path, job: str | None, words: str) -> None:
    write_run_keys(tmp_path / "keys")
    if job is not None:
        (tmp_path / "job.json").write_text(job)
    argv = [sys.executable, "-m", "polyrl_rollout.agent", "--job", str(tmp_path / "job.json"), "--epoch", "1"]
    argv += ["--keys", str(tmp_path / "keys/agent.key"), "--engine-name", "e", "--pool", "spot"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
