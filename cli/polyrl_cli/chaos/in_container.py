"""One fault from inside a container: signals a worker or what it has started, and undoes that, whoever dies meanwhile.

`polyrl chaos` sends this text to be run in the pod (`python -c TEXT ORDER`), so it knows nothing but the standard
library and psutil, and needs no image to be of the command's own version. It answers with one word, and what lasts is
left to a second process, the keeper, which no lost connection and no end of the first one reaches.
Refuses to hold: what a fault is (see `fault_signals`). Read next: `chaos_on_pods`.
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
"""It is done or has begun; no such process lives; the worker does not listen to the signal; another fault lasts."""

LOCK = "polyrl-drill"
"""File in the container's temporary folder, locked while a fault lasts."""

UNASKED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
"""What a keeper does not end by."""


def main(order: dict[str, Any]) -> None:
    """Says what became of the order as soon as that is known, and returns when the fault is over."""
    answer = answer_to(order)
    if answer:
        print(answer, flush=True)


def answer_to(order: dict[str, Any]) -> str:
    """Empty when it was given before: by a fault that lasted."""
    worker = find_worker(order["argv"])
    if worker is None or not targets(worker, order["below"]):
        return GONE
    if order["listens"] and not listens(worker, order["begin"]):
        return DEAF
    if not order["undo"]:
        send(worker, order["below"], order["begin"])
        return DONE
    with open(Path(tempfile.gettempdir()) / LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return BUSY
        keep(worker, order)
    return ""


def find_worker(argv: list[str]) -> psutil.Process | None:
    """The oldest process whose command line begins so."""
    named = [one for one in psutil.process_iter() if command_line(one)[: len(argv)] == argv]
    return min(named, key=psutil.Process.create_time, default=None)


def targets(worker: psutil.Process, below: bool) -> list[psutil.Process]:
    """The worker, or all that it has started, without the dead, and without drills that its death made its children."""
    if not below:
        return [worker]
    drill = psutil.Process().cmdline()[:3]
    try:
        started = worker.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [one for one in started if (line := command_line(one)) and line[:3] != drill]


def command_line(process: psutil.Process) -> list[str]:
    """Empty of one that is dead."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def listens(worker: psutil.Process, number: int) -> bool:
    """Whether it has a handler for the signal; without one, process 1 would not notice and any other would end."""
    for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def send(worker: psutil.Process, below: bool, number: int) -> int:
    """How many were signalled."""
    sent = 0
    for one in targets(worker, below):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)
            sent += 1
    return sent


def keep(worker: psutil.Process, order: dict[str, Any]) -> None:
    """Starts the keeper, answers when it has begun, and stays its parent so that the worker gets no dead child."""
    told, tell = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        # It keeps both ends of the pipe, so that it can tell even when nobody is left to hear.
        os.setsid()
        for number in UNASKED:
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        try:
            last(worker, order, tell)
        finally:
            os._exit(0)
    os.close(tell)
    print(DONE if os.read(told, 1) else GONE, flush=True)
    os.waitpid(keeper, 0)


def last(worker: psutil.Process, order: dict[str, Any], tell: int) -> None:
    """Begins and undoes in turn until the time is over or nobody is left."""
    end = time.monotonic() + order["seconds"]
    while (left := end - time.monotonic()) > 0:
        try:
            if not send(worker, order["below"], order["begin"]):
                return
            os.write(tell, b"1")
            time.sleep(min(order["on"], left))
        finally:
            send(worker, order["below"], order["undo"])
        time.sleep(order["off"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
