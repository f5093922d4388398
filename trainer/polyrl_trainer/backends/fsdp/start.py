"""The group from the leader's side: started, watched, and ended."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, TypeVar

import structlog
import torch

from polyrl.errors import GroupLeft, GroupLost, RunFailed
from polyrl.worker import HANDED_OVER_EXIT, TEMPORARY_EXIT
from polyrl_trainer.backend import OtherMachines
from polyrl_trainer.backends.configs import EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.fsdp.heartbeat import SILENT_S, RankHeartbeat, RankLink
from polyrl_trainer.backends.fsdp.leader import ShardedBackend, ShardedLearners
from polyrl_trainer.backends.fsdp.pods.other_pods import OtherPods
from polyrl_trainer.backends.fsdp.pods.shares import ShareLinks
from polyrl_trainer.backends.fsdp.processes import LOST_EXIT, Followers, end_of, rank_device
from polyrl_trainer.backends.fsdp.ranks import LEADER, LocalMeeting, RankPlace, Ranks
from polyrl_trainer.backends.learners import Learners
from polyrl_trainer.backends.policy import ReferenceScores

R = TypeVar("R")

log = structlog.get_logger()

NOTICED_S: Final = 5.0
"""A broken connection is felt a moment before the process's end, which says more."""
ECHO_S: Final = 1.0
"""A rank ends because another is lost, and may be seen before that one."""
RECHECK_S: Final = 0.02
"""Between two looks for an end that is expected."""
LOAD_POLL_S: Final = 0.1
"""Between two looks for a lost rank while a model is loaded."""
LOST: Final = "a rank of the learner is lost"
"""Where nothing says how."""
LEAVE_S: Final = 15.0
"""From a rank's loss to this process's end, whatever still waits for that rank in a collective that nobody ends."""


class LearnerGroup(Learners):
    """Ranks on this machine, and on those of other pods where there are any; this process is the first."""

    def __init__(
        self,
        processes: int,
        kind: str,
        *,
        threads: int,
        wait_seconds: float,
        silent_s: float = SILENT_S,
        others: OtherPods | None = None,
    ) -> None:
        """Starts the others of this machine, so that they are `processes`, and returns; all are met by the first call
        that needs them, once other pods have been gathered. `kind` is cpu or cuda."""
        self.size = processes * (1 if others is None else 1 + others.number)
        self._others = others
        meeting = LocalMeeting.new() if others is None else others.meeting
        places = [RankPlace(rank, self.size, local_rank=rank, meeting=meeting) for rank in range(processes)]
        self.followers = Followers(places[1:], kind, silent_s=silent_s, threads=threads)
        self._cause: GroupLost | None = None
        self._echo: GroupLost | None = None
        self._noted = threading.Event()
        self._heartbeat = RankHeartbeat(silent_s)
        self._listen(starting=True)
        if others is not None:
            others.watch(self._heartbeat, self._note)
        meet = self._meeting_at(places[LEADER], rank_device(kind, 0))
        self._learners = ShardedLearners(
            meet, self.size, threads, wait_seconds=wait_seconds, why_lost=self._why_lost, unless_lost=self._unless_lost
        )

    def learner(self, model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig) -> ShardedBackend:
        return self._unless_lost(partial(self._learners.learner, model, engine, optimizer))

    def reference(self, model: ModelConfig, engine: EngineConfig) -> ReferenceScores:
        return self._unless_lost(partial(self._learners.reference, model, engine))

    @property
    def machines(self) -> OtherMachines | None:
        return None if self._others is None else _Machines(self._others.shares, self._lost_at)

    async def gather(self) -> None:
        """Whoever cancels this closes the group as well, which ends the thread that waits."""
        if self._others is not None:
            await asyncio.to_thread(self._others.wait)

    async def watch(self) -> None:
        """Raises GroupLost when a rank has ended or is silent; this process then has LEAVE_S to end itself."""
        ended = asyncio.ensure_future(self.followers.first_end())
        noted = asyncio.ensure_future(asyncio.to_thread(self._noted.wait))
        try:
            await asyncio.wait({ended, noted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._noted.set()  # or its thread would stay
            ended.cancel()
        raise await asyncio.to_thread(self._ended)

    def _unless_lost(self, make: Callable[[], R]) -> R:
        """What `make` makes, which takes as long as a model or a checkpoint is to load. The caller's thread is the one
        that would `watch`, so it looks itself. Raises GroupLost as `watch` does."""
        making: Future[R] = Future()
        threading.Thread(target=_settle, args=(making, make), name="learner-load", daemon=True).start()
        while not wait([making], LOAD_POLL_S).done:
            if self._is_one_gone() and not wait([making], ECHO_S).done:
                raise self._ended()
        if isinstance(error := making.exception(), GroupLost) and not self._learners.is_lost:
            raise self._ended() from error
        return making.result()

    def _lost_at(self, error: OSError) -> GroupLost:
        return self._learners.lose(self._why_lost() or GroupLost(str(error)))

    def _is_one_gone(self) -> bool:
        return self._noted.is_set() or bool(self.followers.ended())

    def _require_all(self) -> None:
        """Raises GroupLost when a rank has ended before it came."""
        if self._is_one_gone():
            raise self._why_lost() or GroupLost(LOST)

    def _ended(self) -> GroupLost:
        """Ends what is left of the group; why."""
        why = self._why_lost() or GroupLost(LOST)
        log.error("the learner's group ends", reason=str(why))
        _leave_in(LEAVE_S, HANDED_OVER_EXIT if isinstance(why, GroupLeft) else TEMPORARY_EXIT)
        self._learners.lose(why)
        self.followers.kill()
        if self._others is not None:
            self._others.end_all(done=False, kill=True)
        return why

    def close(self, *, done: bool = False) -> None:
        """The others end by themselves, or by force."""
        if self._others is not None:
            self._others.end_all(done=done, kill=self._learners.is_lost)
        self._heartbeat.close()
        self._learners.end()
        if self._learners.is_lost:
            self.followers.kill()
        self._learners.close()
        self.followers.close()
        if self._others is not None:
            self._others.close()
        # The meeting's descriptor stays open. Torch's store reads its file once more when it is destroyed, which is
        # whenever the collector comes; under a number that another file has by then it would read that for ever.

    def _listen(self, *, starting: bool) -> None:
        """To the other ranks of this machine."""
        for rank, connection in self.followers.links().items():
            name, lost = f"rank {rank} of the learner", lambda sentence: self._note(GroupLost(sentence))
            self._heartbeat.add(name, RankLink(connection), lost, starting=starting)

    def _meeting_at(self, place: RankPlace, device: torch.device) -> Callable[[], Ranks]:
        def meet() -> Ranks:
            met = self._met(place, device)
            # Some may have frozen before their first word was heard.
            self._listen(starting=False)
            return met

        return meet

    def _met(self, place: RankPlace, device: torch.device) -> Ranks:
        if self._others is None:
            return Ranks(place, device, self._require_all)
        try:
            return Ranks(place, device, self._require_all)
        except RunFailed as error:
            # A pod that went while they met: another start may do better.
            raise self._why_lost() or GroupLost(str(error)) from error

    def _note(self, why: GroupLost, echo: bool = False) -> None:
        if echo:
            self._echo = self._echo or why
        else:
            self._cause = self._cause or why
        self._noted.set()

    def _why_lost(self) -> GroupLost | None:
        """The cause of a loss that was noticed, or will be in a moment; its echoes are often seen before."""
        until, echo = time.monotonic() + NOTICED_S, self._echo
        while self._cause is None and time.monotonic() < until:
            echo = echo or self._echo
            for one in self.followers.ended()[:1]:
                why = GroupLost(end_of(one, self.size))
                if one.process.returncode != LOST_EXIT:
                    return why
                echo = echo or why
            if echo is not None:
                until = min(until, time.monotonic() + ECHO_S)
            time.sleep(RECHECK_S)
        return self._cause or echo


class _Machines:
    """Machines of the other pods; see `OtherMachines`."""

    def __init__(self, shares: ShareLinks, lost: Callable[[OSError], GroupLost]) -> None:
        self._shares, self._lost, self.number = shares, lost, shares.number

    def endpoints(self) -> tuple[str, ...]:
        return self._shares.endpoints()

    def ask(self, machine: int, request: bytes, within_s: float) -> bytes:
        return self._shares.ask(machine, request, within_s)

    def lost(self, error: OSError) -> GroupLost:
        return self._lost(error)


def _settle(future: Future[R], make: Callable[[], R]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # noqa: BLE001 - who waits for the future raises it
        future.set_exception(error)


def _leave_in(seconds: float, code: int) -> None:
    """Ends this process by then."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
