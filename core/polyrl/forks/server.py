"""The fork server's own side: waits for requests, and becomes what was asked for.

It has one thread, or it does not serve: what is forked beside other threads holds their locks for ever.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Final

import msgspec
from setproctitle import setproctitle

from polyrl import interpreter, parent_death_signal
from polyrl.forks import own
from polyrl.forks.request import ForkRequest

LONGEST_REQUEST_BYTES: Final = 1 << 20
"""An environment and arguments; the kernel takes a fifth of that in one message."""
MAX_DESCRIPTORS: Final = 64
ADOPTION_S: Final = 5.0
"""How long an orphan's new parent is waited for; the kernel needs microseconds."""
POLL_S: Final = 0.0005
"""Between two looks who the parent is: nothing tells."""
DEAF_TO: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a person sends to a whole group: a server ends with its parent, and not before."""
FIRST_FREE: Final = 3
"""File descriptors below are the standard streams."""
CERTIFICATES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
SERVING: Final = "polyrl: forks processes"
"""How a server is called where processes are listed."""


def run(link: socket.socket) -> None:
    """Serves until whoever asks is gone; in each process that is forked, runs what was asked for instead."""
    request = _serve(link)
    while request is not None and request.starts_others:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = os.getpid()
        if os.fork():
            theirs.close()
            own.set_link(own.ServerLink(ours, own.LOADED_IN))
            break
        # Its own fork server, made before it has threads.
        ours.close()
        _end_with(worker)
        request = _serve(theirs)
    if request is not None:
        sys.argv = [request.module, *map(os.fsdecode, request.arguments)]
        setproctitle(" ".join([sys.executable, "-m", *sys.argv]).encode(errors="replace").decode())
        _compute()
        with interpreter.prompt_exit():  # what the server has loaded says much when it is taken apart
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _serve(link: socket.socket) -> ForkRequest | None:
    """None when nobody asks any more; what was asked for, in the process that is to do it."""
    setproctitle(SERVING)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in DEAF_TO}
    _keep_open(link.fileno())
    while True:
        asked = b""
        with suppress(OSError):
            asked = link.recv(1, socket.MSG_PEEK)
        if not asked or len(os.listdir("/proc/self/task")) > 1:  # libraries start threads of their own
            return None
        between = os.fork()
        if not between:
            try:
                # Not the server: its memory is every fork's, and a trainer's account keys are not an engine's.
                data, files, _, _ = socket.recv_fds(link, LONGEST_REQUEST_BYTES, MAX_DESCRIPTORS)
                request = msgspec.msgpack.decode(data, type=ForkRequest)
                if os.fork():
                    os._exit(0)
                for number, handler in before.items():
                    signal.signal(number, handler)
                _become(request, files, link)
            except BaseException:  # noqa: BLE001 - as a folder that is gone: whoever asked spawns it, and hears why
                os._exit(1)
            return request
        if os.waitpid(between, 0)[1]:
            return None  # it may have left the request unread


def _become(request: ForkRequest, files: list[int], link: socket.socket) -> None:
    """Makes of a fork what it would be if it had been spawned, then says so."""
    until = time.monotonic() + ADOPTION_S
    while os.getppid() != request.parent:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(POLL_S)
    _end_with(request.parent)
    os.environb.clear()
    os.environb.update(request.environment)
    os.chdir(request.folder)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):  # ours change these for all that they start
        resource.setrlimit(limit, resource.prlimit(request.parent, limit))
    if request.own_session:
        os.setsid()
    if request.umask is not None:
        os.umask(request.umask)
    link.close()
    answer = max(request.descriptors) + 1
    _place(files, (answer, *request.descriptors))
    os.write(answer, str(os.getpid()).encode())  # fails where nobody waits for it any more
    os.close(answer)


def _end_with(parent: int) -> None:
    os.environ[parent_death_signal.PARENT_PID] = str(parent)
    parent_death_signal.hold()


def _compute() -> None:
    """By what a library reads of the environment when it is loaded and that may differ, or draws at random then. Starts
    threads: nothing is forked from here on."""
    if (torch := sys.modules.get("torch")) is not None:
        wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # the others are of levels below
        torch.set_num_threads(int(wanted) if wanted.isdecimal() and int(wanted) else len(os.sched_getaffinity(0)))
        torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (aiohttp := sys.modules.get("aiohttp.connector")) is not None and any(map(os.environ.get, CERTIFICATES)):
        vars(aiohttp)["_SSL_CONTEXT_VERIFIED"] = aiohttp._make_ssl_context(True)


def _place(files: list[int], numbers: tuple[int, ...]) -> None:
    """Each file under its number, and nothing else open but standard input."""
    above = max([FIRST_FREE, *numbers, *files]) + 1
    moved = []
    for offset, file in enumerate(files):  # first out of the way: one's number may be another's file
        os.dup2(file, above + offset)
        moved.append(above + offset)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
    _keep_open(*numbers)


def _keep_open(*kept: int) -> None:
    """Closes all but these and the standard streams."""
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) >= FIRST_FREE and number not in kept:
            with suppress(OSError):
                os.close(number)
