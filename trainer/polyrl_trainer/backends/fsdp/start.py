"""The group from the leader's side: started, watched, and ended."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Final

import structlog

from polyrl.errors import GroupLost
from polyrl.worker import TEMPORARY_EXIT
from polyrl_trainer.backends.configs import EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.fsdp.heartbeat import SILENT_S, RankHeartbeat
from polyrl_trainer.backends.fsdp.leader import ShardedBackend, ShardedLearners
from polyrl_trainer.backends.fsdp.processes import Followers, rank_device
from polyrl_trainer.backends.fsdp.ranks import LEADER, RankPlace, Ranks, meeting_file
from polyrl_trainer.backends.learners import Learners
from polyrl_trainer.backends.policy import ReferenceScores

log = structlog.get_logger()

NOTICED_S: Final = 5.0
"""A broken connection is felt a moment before the process's end, which says more."""
LEAVE_S: Final = 15.0
"""From a rank's loss to this process's end, whatever still waits for that rank in a collective that nobody ends."""


class LearnerGroup(Learners):
    """Ranks on this machine; this process is the first."""

    def __init__(self, ranks: int, kind: str, *, threads: int, wait_seconds: float, silent_s: float = SILENT_S) -> None:
        """Starts the others and returns; they are met by the first call that needs them. `kind` is cpu or cuda."""
        self.size = ranks
        self._silence: str | None = None
        self._silent = threading.Event()
        place = RankPlace(LEADER, ranks, local_rank=0, meeting=meeting_file())
        self.followers = Followers(ranks, place.meeting, kind, silent_s=silent_s, threads=threads)
        self._meeting = place.meeting
        self._heartbeat: RankHeartbeat | None = None

        def meet() -> Ranks:
            met = Ranks(place, rank_device(kind, 0))
            self._heartbeat = RankHeartbeat(self.followers.links(), self._note_silence, silent_s=silent_s)
            return met

        self._learners = ShardedLearners(meet, ranks, threads, wait_seconds=wait_seconds, why_lost=self._why_lost)

    def learner(self, model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig) -> ShardedBackend:
        return self._learners.learner(model, engine, optimizer)

    def reference(self, model: ModelConfig, engine: EngineConfig) -> ReferenceScores:
        return self._learners.reference(model, engine)

    async def watch(self) -> None:
        """Raises GroupLost when a rank has ended or is silent; this process then has LEAVE_S to end itself."""
        ended = asyncio.ensure_future(self.followers.first_end())
        silent = asyncio.ensure_future(asyncio.to_thread(self._silent.wait))
        try:
            await asyncio.wait({ended, silent}, return_when=asyncio.FIRST_COMPLETED)
            reason = ended.result() if ended.done() else self._silence or ""
        finally:
            self._silent.set()  # or its thread would stay
            ended.cancel()
        log.error("the learner's group ends", reason=reason)
        _leave_in(LEAVE_S)
        self._learners.lose(reason)
        self.followers.kill()
        raise GroupLost(reason)

    def close(self) -> None:
        """The others end by themselves, or by force."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._learners.close()
        self.followers.close()
        os.close(self._meeting)

    def _note_silence(self, reason: str) -> None:
        self._silence = reason
        self._silent.set()

    def _why_lost(self) -> str | None:
        return self._silence or self.followers.already_ended(NOTICED_S)


def _leave_in(seconds: float) -> None:
    """Ends this process by then."""
    timer = threading.Timer(seconds, os._exit, (TEMPORARY_EXIT,))
    timer.daemon = True
    timer.start()
