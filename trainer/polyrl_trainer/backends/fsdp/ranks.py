"""The group of ranks as each of them sees it: collectives with names, and what fails on one rank fails on all.

Weights and gradients go by FSDP itself. What is here is small: commands, the numbers that a loss needs, and words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyrl.errors import PolyRLError, RunFailed
from polyrl_trainer.backends.loopback import strangers_here

R = TypeVar("R")

LEADER: Final = 0
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
"""Of one collective. Saving and first kernels take minutes; a rank that died or froze is noticed long before, by its
end or its silence (`processes`, `heartbeat`)."""
COMMAND_TIMEOUT: Final = timedelta(days=7)
"""Until the leader's next command: it waits for samples as long as its own deadlines say, and its own silence is
noticed by `heartbeat`."""
REASON_BYTES: Final = 512
"""Of a failure that a rank tells the others."""
LOOPBACK_DEVICE: Final = "lo"
MEETING: Final = "POLYRL_RANK_MEETING_FD"
"""The descriptor of the group's store."""


@dataclass(frozen=True)
class RankPlace:
    """Who this process is, in the words of torchrun's environment, and where the group meets."""

    rank: int
    ranks: int
    local_rank: int
    """On this machine: the number of its GPU."""
    meeting: int
    """The descriptor of a file in memory that only the group's processes have. Torch's own store listens on a port and
    asks nobody who he is: any account of the machine could write into it, or end the group."""

    @classmethod
    def from_environment(cls) -> RankPlace:
        """Raises KeyError where the variables are not set."""
        return cls(
            rank=int(os.environ["RANK"]),
            ranks=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            meeting=int(os.environ[MEETING]),
        )

    def environment(self) -> dict[str, str]:
        """Inverse of `from_environment`."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            MEETING: str(self.meeting),
        }


def meeting_file() -> int:
    """Where a group will meet; it is gone with the last process that has it."""
    return os.memfd_create("polyrl-ranks")


class Ranks:
    """One process's membership in the group. Collectives are in the order of calls, the same on every rank."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        """Meets the others. Raises RunFailed when they do not come within COLLECTIVE_TIMEOUT."""
        self.place = place
        self.device = device
        # Nothing of a group on one machine is reached from outside.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, LOOPBACK_DEVICE)
        try:
            store = dist.FileStore(f"/proc/self/fd/{place.meeting}", place.ranks)  # type: ignore[attr-defined]
            store.set_timeout(COLLECTIVE_TIMEOUT)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.ranks, timeout=COLLECTIVE_TIMEOUT
            )
            commands = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
            assert isinstance(commands, dist.ProcessGroup), "every rank is in it"
            self._commands = commands
            self.mesh: DeviceMesh = init_device_mesh(device.type, (place.ranks,))
        except (RuntimeError, ValueError) as error:
            raise RunFailed(f"the {place.ranks} ranks of the learner did not meet: {error}") from error
        if found := strangers_here():
            self.leave()
            raise RunFailed(
                f"rank {place.rank} of the learner is connected to a process of another account (uid {found[0]}), "
                "which took another rank's place while they met"
            )

    @property
    def leads(self) -> bool:
        return self.place.rank == LEADER

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

    def together(self, work: Callable[[], R]) -> R:
        """Runs `work`, in which no rank waits for another, and fails on every rank where it fails on one: with its own
        error there, with RunFailed elsewhere, which names the first such rank and says its reason."""
        error: PolyRLError | OSError | None = None
        try:
            result = work()
        except (PolyRLError, OSError) as failure:
            error = failure
        reasons = self._reasons("" if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        failed = [f"rank {rank} of the learner: {reason}" for rank, reason in enumerate(reasons) if reason]
        if failed:
            raise RunFailed(failed[0])
        return result

    def leave(self) -> None:
        """Ends the membership; others that still wait for this rank fail."""
        dist.destroy_process_group()

    def _reasons(self, mine: str) -> list[str]:
        own = torch.zeros(REASON_BYTES, dtype=torch.uint8)
        content = mine.encode()[:REASON_BYTES]
        own[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.place.ranks)]
        dist.all_gather(found, own, self._commands)
        return [one.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for one in found]
