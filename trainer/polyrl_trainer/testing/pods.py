"""Pods of a trainer for tests: each the processes of one session on this machine, started again as their Job would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from polyrl.keys import TrainerKeys, read_keys
from polyrl.testing.started import StartedProcess, words_of
from polyrl.wire.sealing import LastingKeys
from polyrl.worker import EXPLAINED_EXITS

END_S = 60.0
POLL_S = 0.05


def pod_keys(folder: Path) -> LastingKeys:
    """Keys of the run whose folder this is."""
    keys = read_keys(TrainerKeys, folder / "keys" / "trainer.key")
    return LastingKeys.of(keys.secret_key, keys.public_key, keys.public_key)


def start_pod(folder: Path, pod: int, port: int, *more: str) -> subprocess.Popen[bytes]:
    """`folder` has job.json, keys/ and run/; what the pod says is in pod-N.log. `more`: arguments."""
    argv = [sys.executable, "-m", "polyrl_trainer", "--job", f"{folder}/job.json", "--epoch", "1", "--hand-over"]
    argv += ["--manifest-dir", str(folder), "--run", f"{folder}/run", "--keys", f"{folder}/keys/trainer.key"]
    argv += ["--pod", str(pod), "--pods-at", f"127.0.0.1:{port}", *more]
    # A pod's own name leads to its address; here all are one machine.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / f"pod-{pod}.log").open("ab") as log:
        return StartedProcess(argv, stderr=log, stdout=log, env=environment, start_new_session=True)


def ranks_of(pod: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Ranks that the pod started."""
    return [one for one in psutil.Process(pod.pid).children() if "polyrl_trainer.backends.fsdp" in words_of(one)]


def end_pod(pod: subprocess.Popen[bytes]) -> None:
    """All of its processes, as when its machine is gone; fine when it has ended."""
    if pod.poll() is None:
        os.killpg(pod.pid, signal.SIGKILL)
        pod.wait(END_S)


class PodsOfAJob:
    """What an Indexed Job does of its pods' ends."""

    def __init__(self, folder: Path, number: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        self._start: Callable[[int], subprocess.Popen[bytes]] = lambda pod: start_pod(folder, pod, port)
        self.running = {pod: self._start(pod) for pod in range(number)}
        self.ends: list[tuple[int, int]] = []
        """Each pod's number and exit status, in their order."""

    def turn(self) -> bool:
        """Starts again what has ended before its time; False when all are done."""
        for pod, process in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            self.ends.append((pod, code))
            assert code not in EXPLAINED_EXITS, f"pod {pod} ended with {code}"
            del self.running[pod]
            if code != 0:
                self.running[pod] = self._start(pod)
        return bool(self.running)

    def until(self, reached: Callable[[], bool], within_s: float) -> None:
        """Raises TimeoutError."""
        until = time.monotonic() + within_s
        while self.turn() and not reached():
            if time.monotonic() > until:
                raise TimeoutError(f"not within {within_s:g} s; ends so far: {self.ends}")
            time.sleep(POLL_S)


@contextmanager
def pods_of_a_job(folder: Path, number: int) -> Iterator[PodsOfAJob]:
    """Ends all of their processes on the way out."""
    pods = PodsOfAJob(folder, number)
    try:
        yield pods
    finally:
        for process in pods.running.values():
            end_pod(process)
