"""`python -m polyrl_rollout.manager`: starts, says where it listens, refuses wrong input, ends with its parent."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from polyrl.control import Endpoints, parse_endpoints
from polyrl.parent_death_signal import PARENT_PID
from polyrl.testing.started import StartedProcess, ran
from polyrl_operator.secret import write_run_keys
from polyrl_trainer.client import RolloutClient

DEADLINE_S = 60.0
# Descriptors that the strangers may take.
ROOM = 4
JOB = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "test"},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {"path": "model"},
            "data": {"rl": [{"path": "prompts.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": 1},
        }
    },
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run_keys(tmp_path / "keys")
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    return tmp_path


def command(run: Path, keys: str = "manager.key") -> list[str]:
    places = ["--job", f"{run}/job.json", "--keys", f"{run}/keys/{keys}", "--endpoints", f"{run}/run/manager.json"]
    places += ["--journal", f"{run}/journal.sqlite"]
    return [sys.executable, "-m", "polyrl_rollout.manager", *places, "--epoch", "3"]


@pytest.fixture
def process(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (run / "log").open("wb") as log, StartedProcess(command(run), stderr=log) as started:
        yield started
        started.kill()


def wait_for(path: Path) -> Endpoints:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, (path.parents[1] / "log").read_text()
        time.sleep(0.02)
    return parse_endpoints(path.read_bytes(), str(path))


def test_it_says_where_it_listens_and_ends_on_sigterm(run: Path, process: subprocess.Popen[bytes]) -> None:
    ends = wait_for(run / "run/manager.json")
    assert (ends.pid, ends.run_epoch) == (process.pid, 3)
    bound = {f"tcp://{c.laddr.ip}:{c.laddr.port}" for c in psutil.Process(process.pid).net_connections("tcp")}
    assert {ends.agents, ends.trainer, ends.http.replace("http", "tcp")} == bound
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert all(json.loads(line)["event"] for line in (run / "log").read_text().splitlines())


async def test_it_ends_after_finish(run: Path, process: subprocess.Popen[bytes]) -> None:
    async with RolloutClient.connect(run / "run/manager.json", run / "keys/trainer.key", 3) as client:
        await client.finish(True, "done")
    assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0


async def test_strangers_that_take_every_descriptor_do_not_end_it(run: Path, process: subprocess.Popen[bytes]) -> None:
    """They dial and are silent until they are closed; meanwhile nothing can be accepted, HTTP included."""
    endpoints = wait_for(run / "run" / "manager.json")
    # What it has open and a little more: full with the first who dial, however soon it closes the silent ones.
    manager = psutil.Process(process.pid)
    full = manager.num_fds() + ROOM
    manager.rlimit(psutil.RLIMIT_NOFILE, (full, manager.rlimit(psutil.RLIMIT_NOFILE)[1]))
    deadline = time.monotonic() + DEADLINE_S
    with ExitStack() as strangers:
        while "no connection is accepted" not in (run / "log").read_text():
            assert time.monotonic() < deadline, (run / "log").read_text()
            assert process.poll() is None, (run / "log").read_text()
            for endpoint in (endpoints.agents, endpoints.http):
                address = ("127.0.0.1", urlsplit(endpoint).port)
                strangers.enter_context(socket.create_connection(address, DEADLINE_S))
            await asyncio.sleep(0.02)
    async with RolloutClient.connect(run / "run/manager.json", run / "keys/trainer.key", 3) as client:
        await client.finish(True, "done")
    assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0


def test_it_ends_with_its_parent(run: Path) -> None:
    script = f"""
import os, subprocess, time
subprocess.Popen({command(run)!r}, env={{**os.environ, {PARENT_PID!r}: str(os.getpid())}})
time.sleep({DEADLINE_S})
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as parent:
        manager = psutil.Process(wait_for(run / "run/manager.json").pid)
        parent.kill()
    psutil.wait_procs([manager], timeout=DEADLINE_S)
    assert not manager.is_running() or manager.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("keys", "job", "sentence"),
    [
        ("agent.key", json.dumps(JOB), "agent.key: not a key file of manager"),
        ("nowhere.key", json.dumps(JOB), "nowhere.key: cannot read the key file"),
        ("manager.key", "{}", "job.json: apiVersion: Field required"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_2(run: Path, keys: str, job: str, sentence: str) -> None:
    (run / "job.json").write_text(job)
    ended = ran(command(run, keys), timeout_s=DEADLINE_S)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_secret_shows_in_its_arguments_or_its_log(run: Path, process: subprocess.Popen[bytes]) -> None:
    wait_for(run / "run/manager.json")
    shown = " ".join(psutil.Process(process.pid).cmdline()) + (run / "log").read_text()
    keys = json.loads((run / "keys/manager.key").read_text())
    assert keys["secretKey"] not in shown
    assert keys["httpToken"] not in shown
