"""The group of ranks as each of them sees it: collectives with names, and what fails on one rank fails on all.

Weights and gradients go by FSDP itself. What is here is small: commands, the numbers that a loss needs, and words.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyrl.errors import DiskRefused, PolyRLError, RunFailed
from polyrl_trainer.backends.loopback import strangers_here
from polyrl_trainer.backends.models.sequence_slices import SequenceSlices
from polyrl_trainer.checkpoints.writer import Writer

R = TypeVar("R")

LEADER: Final = 0
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
"""Longest time of one collective. Saving and first kernels take minutes; a rank that died or froze is noticed long
before, by its end or its silence (`processes`, `heartbeat`)."""
COMMAND_TIMEOUT: Final = timedelta(days=7)
"""Until the leader's next command: it waits for samples as long as its own deadlines say, and its own silence is
noticed by `heartbeat`."""
PRESENT: Final = "polyrl-here-"
"""What a rank's key in the group's store begins with."""
GATHER_POLL_S: Final = 0.02
"""Between two looks for those who are still to come; their start takes seconds."""
REASON_BYTES: Final = 512
"""Bytes of a failure that a rank tells the others."""
UNDER_WAY: Final = 4
"""Pieces that a rank gives at once: the next one is copied, and goes to another, while one is on its way."""
REPLICATE, SHARD = "replicate", "shard"
"""Dimensions of a mesh."""
LOOPBACK_DEVICE: Final = "lo"
MEETING: Final = "POLYRL_RANK_MEETING"
"""The descriptor of the group's store, or its host and port."""


@dataclass(frozen=True)
class LocalMeeting:
    """A file in memory that only the group's processes have. Torch's own store listens on a port and asks nobody who he
    is: any account of the machine could write into it, or end the group."""

    descriptor: int

    @classmethod
    def new(cls) -> LocalMeeting:
        """It is gone with the last process that has it."""
        return cls(os.memfd_create("polyrl-ranks"))

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that another rank must have."""
        return (self.descriptor,)

    def store(self, place: RankPlace) -> Store:
        """Where `place` meets the others."""
        return dist.FileStore(f"/proc/self/fd/{self.descriptor}", place.ranks)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return str(self.descriptor)


@dataclass(frozen=True)
class RemoteMeeting:
    """Torch's store in the first of several pods, whom the network lets to it alone."""

    host: str
    port: int
    listening: int | None = None
    """The leader's: the descriptor of its socket, so that the port is known before the store is there."""
    inherited: tuple[int, ...] = ()

    def store(self, place: RankPlace) -> Store:
        return TCPStore(
            self.host,
            self.port,
            place.ranks,
            is_master=place.rank == LEADER,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=self.listening,
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Meeting = LocalMeeting | RemoteMeeting


def _meeting_of(text: str) -> Meeting:
    """Inverse of `str`."""
    host, _, number = text.rpartition(":")
    return RemoteMeeting(host, int(number)) if host else LocalMeeting(int(number))


@dataclass(frozen=True)
class RankPlace:
    """Who this process is, in the words of torchrun's environment, and where the group meets."""

    rank: int
    ranks: int
    local_rank: int
    """On this machine: the number of its GPU."""
    meeting: Meeting

    @classmethod
    def from_environment(cls) -> RankPlace:
        """Raises KeyError where the variables are not set."""
        return cls(
            rank=int(os.environ["RANK"]),
            ranks=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            meeting=_meeting_of(os.environ[MEETING]),
        )

    def environment(self) -> dict[str, str]:
        """Inverse of `from_environment`."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            MEETING: str(self.meeting),
        }


def _gather(store: Store, place: RankPlace, still: Callable[[], None]) -> None:
    """The leader waits here until all have come: torch's own wait cannot be ended. Raises what `still` raises."""
    store.set(f"{PRESENT}{place.rank}", "")
    wanted = [f"{PRESENT}{rank}" for rank in range(place.ranks)]
    until = time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
    while place.rank == LEADER and not store.check(wanted):
        still()
        if time.monotonic() > until:
            raise RuntimeError(f"not all came within {COLLECTIVE_TIMEOUT.total_seconds():g} s")
        time.sleep(GATHER_POLL_S)


class Ranks:
    """One process's membership in the group. Collectives are in the order of calls, the same on every rank."""

    def __init__(self, place: RankPlace, device: torch.device, still: Callable[[], None] = lambda: None) -> None:
        """Meets the others. Raises RunFailed when they do not come within COLLECTIVE_TIMEOUT, and what `still` raises,
        which the leader asks meanwhile."""
        self.place = place
        self.device = device
        self.writer = Writer("saved state")
        """What it writes, it may write `together` with the others' writers: in the same order on every rank."""
        self._slices: dict[int, SequenceSlices] = {}
        if isinstance(place.meeting, LocalMeeting):
            # Nothing of a group on one machine is reached from outside.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, LOOPBACK_DEVICE)
        try:
            store = place.meeting.store(place)
            store.set_timeout(COLLECTIVE_TIMEOUT)
            _gather(store, place, still)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.ranks, timeout=COLLECTIVE_TIMEOUT
            )
            commands = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
            assert isinstance(commands, dist.ProcessGroup), "every rank is in it"
            self._commands = commands
            saving = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            assert isinstance(saving, dist.ProcessGroup), "every rank is in it"
            self._saving = saving
            self._meshes: dict[int, DeviceMesh] = {}
        except (RuntimeError, ValueError) as error:
            raise RunFailed(f"the {place.ranks} ranks of the learner did not meet: {error}") from error
        if found := strangers_here():
            self.leave()
            raise RunFailed(
                f"rank {place.rank} of the learner is connected to a process of another account (uid {found[0]}), "
                "which took another rank's place while they met"
            )

    def mesh(self, copies: int) -> DeviceMesh:
        """Over which a model is cut; of several copies the first dimension counts them, and the last their shards.
        Every rank asks for it at the same time."""
        if copies not in self._meshes:
            names, sizes = (REPLICATE, SHARD), (copies, self.place.ranks // copies)
            first = int(copies == 1)
            self._meshes[copies] = init_device_mesh(self.device.type, sizes[first:], mesh_dim_names=names[first:])
        return self._meshes[copies]

    @property
    def leads(self) -> bool:
        return self.place.rank == LEADER

    def slices(self, number: int) -> SequenceSlices | None:
        """This rank's place among so many neighbours that have rows together; None where each has its own. Every rank
        calls this at the same time."""
        if number == 1:
            return None
        if number not in self._slices:
            names = ("learners", "slices")
            mesh = init_device_mesh(self.device.type, (self.place.ranks // number, number), mesh_dim_names=names)
            group = mesh.get_group("slices")
            self._slices[number] = SequenceSlices(group, number, own=self.place.rank % number)
        return self._slices[number]

    def send(self, command: bytes) -> None:
        """The leader's, to all others."""
        content = torch.frombuffer(bytearray(command), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(command)]), LEADER, self._commands)
        dist.broadcast(content, LEADER, self._commands)

    def receive(self) -> bytes:
        """What the leader sends next."""
        size = torch.empty(1, dtype=torch.int64)
        dist.broadcast(size, LEADER, self._commands)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, LEADER, self._commands)
        return content.numpy().tobytes()

    def gather(self, columns: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor] | None:
        """The leader gets every rank's float32[K, counts[rank]], the others None."""
        padded = columns.new_zeros(columns.shape[0], max(counts))
        padded[:, : columns.shape[1]] = columns
        found = [torch.empty_like(padded) for _ in counts] if self.leads else None
        dist.gather(padded, found, LEADER)
        return None if found is None else [one[:, :count] for one, count in zip(found, counts, strict=True)]

    def scatter(self, parts: Sequence[torch.Tensor] | None, like: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """This rank's of the leader's `parts`, float32[K, counts[rank]] each."""
        mine = like.new_empty(like.shape[0], max(counts))
        padded = None
        if parts is not None:
            padded = [torch.zeros_like(mine) for _ in counts]
            for whole, part in zip(padded, parts, strict=True):
                whole[:, : part.shape[1]] = part
        dist.scatter(mine, padded, LEADER)
        return mine[:, : counts[self.place.rank]]

    def give(self, content: torch.Tensor) -> None:
        """To the leader, from memory of the host; it calls `take` for each."""
        dist.send(content, LEADER)

    def take(self, into: torch.Tensor, rank: int) -> None:
        """Inverse of `give`."""
        dist.recv(into, rank)

    def exchange(self, takes: Iterable[tuple[torch.Tensor, int]], gives: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Fills what each rank of `takes` gives, in the order in which that one gives it; all ranks at the same time,
        from and to memory of the host."""
        # All that may come is awaited before anything is given: nobody waits for one who waits for him.
        coming = [dist.irecv(into, rank) for into, rank in takes]
        going = deque[dist.Work | None]()
        for piece, rank in gives:
            going.append(dist.isend(piece, rank))
            if len(going) >= UNDER_WAY:
                _finish(going.popleft())
        for work in (*going, *coming):
            _finish(work)

    def together(self, work: Callable[[], R], *, saving: bool = False) -> R:
        """Runs `work`, in which no rank waits for another, and fails on every rank where it fails on one: with its own
        error there, with RunFailed elsewhere, which names the first such rank and says its reason. `saving`: on every
        rank this is its writer's thread, beside the collectives of the others, and the error DiskRefused."""
        error: PolyRLError | OSError | None = None
        try:
            result = work()
        except (PolyRLError, OSError) as failure:
            error = failure
        mine = "" if error is None else str(error) or type(error).__name__
        reasons = self._reasons(mine, self._saving if saving else self._commands)
        if error is not None:
            raise error
        failed = [f"rank {rank} of the learner: {reason}" for rank, reason in enumerate(reasons) if reason]
        if failed:
            raise (DiskRefused if saving else RunFailed)(failed[0])
        return result

    def leave(self) -> None:
        """Ends the membership; others that still wait for this rank fail."""
        dist.destroy_process_group()

    def _reasons(self, mine: str, group: dist.ProcessGroup) -> list[str]:
        own = torch.zeros(REASON_BYTES, dtype=torch.uint8)
        content = mine.encode()[:REASON_BYTES]
        own[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.place.ranks)]
        dist.all_gather(found, own, group)
        return [one.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for one in found]


def _finish(work: dist.Work | None) -> None:
    """torch has none for a process that is no member, which nobody is here."""
    if work is not None:
        work.wait()
