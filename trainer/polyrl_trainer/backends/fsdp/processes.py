"""The followers on this machine: started by the leader's process, or by that of another pod, ended with it, and their
end noticed.

Each is tied to its parent by the kernel (`parent_death_signal`), so that none outlives a leader that was killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from polyrl import parent_death_signal
from polyrl.forks import Forked, OutputFiles, start
from polyrl_trainer.backends.fsdp.heartbeat import LINK
from polyrl_trainer.backends.fsdp.ranks import RankPlace

DEVICE: Final = "POLYRL_RANK_DEVICE"
"""What kind of device a follower computes on: `cpu` or `cuda`."""
SILENCE: Final = "POLYRL_RANK_SILENCE_SECONDS"
"""How long a rank may be silent before it counts as lost."""
STDOUT: Final = 1
STDERR: Final = 2
LOST_EXIT: Final = 1
"""Exit code of a rank without the leader, or at odds with the others."""
END_S: Final = 10.0
"""Longest wait for followers whose run is over."""


def rank_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank: of a machine's GPUs each rank has the one of its number."""
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


@dataclass(frozen=True)
class Follower:
    """A process and its rank."""

    rank: int
    process: subprocess.Popen[bytes] | Forked
    link: socket.socket
    """For heartbeats; the other end is that process's alone."""


class Followers:
    """Followers on one machine."""

    def __init__(self, places: Sequence[RankPlace], kind: str, *, silent_s: float, threads: int) -> None:
        """Starts a rank for each place. The kernel ends them with the thread that calls this."""
        environment = {DEVICE: kind, SILENCE: str(silent_s), "OMP_NUM_THREADS": str(threads)}
        self._all = [_start(place, environment) for place in places]

    def links(self) -> dict[int, socket.socket]:
        """By rank."""
        return {one.rank: one.link for one in self._all}

    async def first_end(self) -> Follower:
        """Waits until one has ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Follower] = loop.create_future()

        def note(one: Follower) -> None:
            if not ended.done():
                ended.set_result(one)

        watched = [(os.pidfd_open(one.process.pid), one) for one in self._all]
        try:
            for descriptor, one in watched:
                loop.add_reader(descriptor, note, one)
            return await ended
        finally:
            for descriptor, _ in watched:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def ended(self) -> list[Follower]:
        """Followers that have ended, ranks that another's loss ended last."""
        found = [one for one in self._all if one.process.poll() is not None]
        return sorted(found, key=lambda one: one.process.returncode == LOST_EXIT)

    def kill(self) -> None:
        """All of them, now: what still waits for one of them fails."""
        for one in self._all:
            one.process.kill()

    def close(self, within_s: float = END_S) -> None:
        """Waits for those that end by themselves, and ends the rest."""
        for one in self._all:
            try:
                one.process.wait(within_s)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            one.link.close()


def _start(place: RankPlace, own: Mapping[str, str]) -> Follower:
    mine, theirs = socket.socketpair()
    environment = {
        **os.environ,
        **place.environment(),
        **own,
        LINK: str(theirs.fileno()),
        parent_death_signal.PARENT_PID: str(os.getpid()),
    }
    command = [sys.executable, "-m", "polyrl_trainer.backends.fsdp"]
    passed = (*place.meeting.inherited, theirs.fileno())
    with theirs:
        process = start(command, environment, OutputFiles(STDOUT, STDERR), passed=passed)
    return Follower(place.rank, process, link=mine)


def end_of(one: Follower, ranks: int) -> str:
    """A sentence's subject and verb."""
    code = one.process.wait()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {one.rank} of the learner's {ranks} {how}"
