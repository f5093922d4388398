"""One fault from inside a container: signals a worker or what it has started, and undoes that, whoever dies meanwhile.

`polyrl chaos` sends this text to be run in the pod (`python -c TEXT ORDER`), so it knows nothing but the standard
library and psutil, and needs no image to be of the command's own version. It answers with one word. A fault that lasts
is left to a second process, the keeper, which no lost connection and no end of the first process reaches.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

DONE, GONE, DEAF, BUSY = "done", "gone", "deaf", "busy"
"""Done or begun; no such process lives; the worker has no handler for the signal; another fault lasts."""

LOCK = "polyrl-fault"
"""File in the container's temporary folder, locked while a fault lasts."""

IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
"""Signals that do not end a keeper."""


def main(order: dict[str, Any]) -> None:
    """Prints the answer as soon as it is known, and returns when the fault is over."""
    worker = find_worker(order["argv"])
    if worker is None or not targets(worker, order["below"]):
        print(GONE, flush=True)
    elif order["listens"] and not has_handler(worker, order["begin"]):
        print(DEAF, flush=True)
    elif not order["undo"]:
        send(worker, order["below"], order["begin"])
        print(DONE, flush=True)
    else:
        with open(Path(tempfile.gettempdir()) / LOCK, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(BUSY, flush=True)
            else:
                run_keeper(worker, order)


def find_worker(argv: list[str]) -> psutil.Process | None:
    """The oldest process whose command line begins so."""
    named = [process for process in psutil.process_iter() if command_line(process)[: len(argv)] == argv]
    return min(named, key=psutil.Process.create_time, default=None)


def targets(worker: psutil.Process, below: bool) -> list[psutil.Process]:
    """The worker itself, or all living processes that it has started.

    A fault's own processes are left out: process 1 inherits keepers whose parent has died.
    """
    if not below:
        return [worker]
    fault = psutil.Process().cmdline()[:3]
    try:
        started = worker.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in started if (line := command_line(process)) and line[:3] != fault]


def command_line(process: psutil.Process) -> list[str]:
    """Its words; none when it is dead."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def has_handler(worker: psutil.Process, number: int) -> bool:
    """Whether it handles the signal; without a handler, process 1 would not notice and any other would end."""
    for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def send(worker: psutil.Process, below: bool, number: int) -> int:
    """How many were signalled."""
    sent = 0
    for process in targets(worker, below):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            sent += 1
    return sent


def run_keeper(worker: psutil.Process, order: dict[str, Any]) -> None:
    """Starts the keeper, answers when it has begun, and stays its parent so that the worker gets no dead child."""
    begun, begin = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        # The keeper keeps both ends of the pipe, so that it can write even when the reader is dead.
        os.setsid()
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        try:
            keep(worker, order, begin)
        finally:
            os._exit(0)
    os.close(begin)
    print(DONE if os.read(begun, 1) else GONE, flush=True)
    os.waitpid(keeper, 0)


def keep(worker: psutil.Process, order: dict[str, Any], begin: int) -> None:
    """Begins and undoes in turn until the time is over or nobody is left."""
    end = time.monotonic() + order["seconds"]
    while (left := end - time.monotonic()) > 0:
        try:
            if not send(worker, order["below"], order["begin"]):
                return
            os.write(begin, b"1")
            time.sleep(min(order["on"], left))
        finally:
            send(worker, order["below"], order["undo"])
        time.sleep(order["off"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
