"""A trainer's container as processes, with stand-ins: agents are kept, labelled and ended with the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from polyrl.parent_death_signal import PARENT_PID

HELD = "from polyrl import parent_death_signal; parent_death_signal.hold()\n"
"""As every program of ours begins."""
LEAVES = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('left', flush=True), sys.exit()))\n"
SLEEPS = f"{HELD}{LEAVES}import time; print('up', flush=True); time.sleep(600)"
DEAF = SLEEPS.replace("sys.exit()", "None")
SAVES = (
    f"{HELD}"
    "import signal, sys, time, pathlib\n"
    "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1], 'saved').touch(), sys.exit(143)))\n"
    "pathlib.Path(sys.argv[1], 'ready').touch()\n"
    "time.sleep(600)"
)
ENDS_S = 30.0


class Container:
    """One running container."""

    def __init__(self, folder: Path, agent: str, trainer: str, engines: int = 2) -> None:
        self.folder, self.log = folder, folder / "log"
        counts = ["--engines", str(engines), "--gpus-each", "1", "--threads", "1"]
        agents = [sys.executable, "-c", agent, "engine-{engine}"]
        command = [sys.executable, "-m", "polyrl_trainer.container", *counts]
        command += ["--", *agents, "--", sys.executable, "-c", trainer, str(folder)]
        with self.log.open("wb") as log:
            env = {**os.environ, PARENT_PID: str(os.getpid())}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    def agent(self, number: int) -> psutil.Process | None:
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if process.cmdline()[-1:] == [f"engine-{number}"]:
                    return process
        return None

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


def wait_until(holds: Callable[[], object], what: str) -> None:
    until = time.monotonic() + ENDS_S
    while not holds():
        assert time.monotonic() < until, f"no {what} within {ENDS_S} s"
        time.sleep(0.02)


def started(folder: Path, agent: str = SLEEPS, trainer: str = SAVES, engines: int = 2) -> Container:
    made = Container(folder, agent, trainer, engines)
    wait_until(lambda: len([line for line in made.lines() if line.endswith("up")]) == engines, "the agents")
    return made


def test_agents_are_labelled_started_again_and_end_with_the_trainer(tmp_path: Path) -> None:
    made = started(tmp_path)
    wait_until((tmp_path / "ready").exists, "the trainer")
    agents = [made.agent(0), made.agent(1)]
    assert sorted(made.lines()) == ["[reserved 0] up", "[reserved 1] up"]
    assert agents[1] is not None
    agents[1].kill()
    wait_until(lambda: made.agent(1) not in (agents[1], None), "its successor")
    wait_until(lambda: made.lines().count("[reserved 1] up") == 2, "its first line")
    assert "[reserved 1] ended with exit status 137; started again in 1 s" in made.lines()
    assert made.agent(0) == agents[0], "the other one goes on"
    last = [one for one in (made.agent(0), made.agent(1)) if one is not None]
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(ENDS_S) == 143
    assert (tmp_path / "saved").exists()
    assert not any(one.is_running() for one in last)
    assert {"[reserved 0] left", "[reserved 1] left"} <= set(made.lines()), "asked before they are ended"


def test_an_agent_that_does_not_listen_ends_with_the_trainer_too(tmp_path: Path) -> None:
    made = started(tmp_path, agent=DEAF, engines=1)
    wait_until((tmp_path / "ready").exists, "the trainer")
    agent = made.agent(0)
    assert agent is not None
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(ENDS_S) == 143
    assert not agent.is_running()


def test_agents_that_cannot_start_leave_the_trainer_to_its_work(tmp_path: Path) -> None:
    made = Container(tmp_path, "import sys; sys.exit(3)", "import time; time.sleep(2.5); raise SystemExit(7)")
    assert made.process.wait(ENDS_S) == 7
    assert "[reserved 0] ended with exit status 3; started again in 2 s" in made.lines()


def test_all_end_with_the_container_whatever_kills_it(tmp_path: Path) -> None:
    made = started(tmp_path)
    wait_until((tmp_path / "ready").exists, "the trainer")
    below = psutil.Process(made.process.pid).children()
    assert len(below) == 3
    made.process.kill()
    made.process.wait()
    _, alive = psutil.wait_procs(below, ENDS_S)
    assert not alive


def test_a_signal_that_comes_while_it_starts_is_the_trainers(tmp_path: Path) -> None:
    """It was lost: process 1 has no default, and nothing listened before all was imported."""
    made = Container(tmp_path, SLEEPS, SAVES, engines=1)
    wait_until(lambda: blocks_stops(made.process.pid), "first line")
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(ENDS_S) in (143, 128 + signal.SIGTERM), "the trainer's, wherever it was"


def blocks_stops(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk")]
    return bool(mask & 1 << (signal.SIGTERM - 1))


def test_whoever_reads_the_log_may_go_away(tmp_path: Path) -> None:
    agent = "import sys; sys.exit(3)"
    trainer = "import time; time.sleep(2.5); raise SystemExit(7)"
    command = [sys.executable, "-m", "polyrl_trainer.container", "--engines", "1", "--gpus-each", "1", "--threads", "1"]
    command += ["--", sys.executable, "-c", agent, "{engine}", "--", sys.executable, "-c", trainer]
    env = {**os.environ, PARENT_PID: str(os.getpid())}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(ENDS_S) == 7


STRAYS = "import subprocess, sys; subprocess.Popen(['sleep', '0.3']); sys.exit(3)"
"""An agent whose engine outlives it for a moment."""
COUNTS = """
import pathlib, sys, time
time.sleep(7)
states = [path.read_text().rpartition(')')[2].split() for path in pathlib.Path('/proc').glob('[0-9]*/stat')]
sys.exit(10 + sum(state[0] == 'Z' and state[1] == '1' for state in states))
"""


def test_process_1_waits_for_what_falls_to_it(tmp_path: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this account makes no process 1 of its own")
    command = [*apart, sys.executable, "-m", "polyrl_trainer.container", "--engines", "3", "--gpus-each", "1"]
    command += ["--threads", "1", "--", sys.executable, "-c", STRAYS, "{engine}", "--", sys.executable, "-c", COUNTS]
    env = {name: value for name, value in os.environ.items() if name != PARENT_PID}
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(command, stderr=log, env=env, timeout=ENDS_S, check=False)
    zombies = done.returncode - 10
    assert 0 <= zombies <= 3, (tmp_path / "log").read_text()
