"""Any pod but the first: its process finds the first one, starts ranks, and ends as that one says.

It computes nothing itself, so that it notices a rank of its own which is frozen, and the first pod's silence. Its exit
code says what the cluster is to make of it: 0 when the run is done, HANDED_OVER_EXIT when the group is started again
and somebody else counts why, TEMPORARY_EXIT when it waited in vain for the first pod to come, or to say what follows.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from polyrl.errors import PolyRLError, ProtocolError
from polyrl.wire.sealing import LastingKeys
from polyrl.worker import HANDED_OVER_EXIT, TEMPORARY_EXIT
from polyrl_trainer.backends.fsdp.heartbeat import SILENT_S, RankHeartbeat, RankLink
from polyrl_trainer.backends.fsdp.pods.link import PodLink
from polyrl_trainer.backends.fsdp.pods.messages import (
    REASON_CHARACTERS,
    HelloMessage,
    LeavingMessage,
    LostMessage,
    OverMessage,
    PodMessage,
    WelcomeMessage,
)
from polyrl_trainer.backends.fsdp.pods.shares import PodShare, ShareAnswers
from polyrl_trainer.backends.fsdp.processes import LOST_EXIT, Followers, end_of
from polyrl_trainer.backends.fsdp.ranks import RankPlace, RemoteMeeting

log = structlog.get_logger()

T = TypeVar("T")

DIAL_S: Final = 1800.0
"""For the first pod to come; as long as a trainer bears its manager's absence."""
POD_REDIAL_S: Final = 1.0
VERDICT_S: Final = 20.0
"""For the first pod to say what follows from a lost rank; it may notice for itself first."""


@dataclass(frozen=True)
class MemberPlace:
    """Which pod this is, and what it starts."""

    pod: int
    pods: int
    processes: int
    """Ranks of each pod."""
    leader: tuple[str, int]
    """Host and port of the first pod."""
    kind: str
    """cpu or cuda."""
    threads: int
    """Threads of each rank."""

    @property
    def all_ranks(self) -> int:
        return self.pods * self.processes

    def ranks(self, host: str, port: int) -> list[RankPlace]:
        """This pod's, whose store is there."""
        first, meeting = self.pod * self.processes, RemoteMeeting(host, port)
        return [
            RankPlace(first + own, self.all_ranks, local_rank=own, meeting=meeting) for own in range(self.processes)
        ]


class PodMember:
    """One start of a pod."""

    def __init__(
        self,
        place: MemberPlace,
        keys: LastingKeys,
        was_done: Callable[[], bool],
        silent_s: float = SILENT_S,
        share: PodShare | None = None,
    ) -> None:
        """`was_done` tells whether the run got to its end before: then nobody is there to be found. `share`: of weight
        versions, where there are engines."""
        self._place, self._keys, self._was_done, self._silent_s, self._share = place, keys, was_done, silent_s, share
        self._asked = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked.set)
        found = await self._find()
        return found if isinstance(found, int) else await self._serve(*found)

    async def _find(self) -> tuple[PodLink, int] | int:
        """The first pod and its store's port, or an exit code."""
        until, reason = time.monotonic() + DIAL_S, ""
        while time.monotonic() < until:
            if self._was_done():
                return 0
            if self._asked.is_set():
                return HANDED_OVER_EXIT
            try:
                return await asyncio.to_thread(self._dial)
            except (OSError, PolyRLError) as error:
                reason = str(error)
            try:
                async with asyncio.timeout(POD_REDIAL_S):
                    await self._asked.wait()
            except TimeoutError:
                continue
        host, port = self._place.leader
        print(f"waited {DIAL_S:g} s for the trainer's first pod at {host}:{port}: {reason}", file=sys.stderr)
        return TEMPORARY_EXIT

    def _dial(self) -> tuple[PodLink, int]:
        link = PodLink.dial(self._place.leader, self._keys)
        link.send(HelloMessage(self._place.pod))
        try:
            message = link.next()
            if not isinstance(message, WelcomeMessage):
                raise ProtocolError(f"the trainer's first pod answered {message}")
        except BaseException:
            link.close()
            raise
        log.info("the trainer's first pod was found", at=link.peer, pod=self._place.pod, of=self._place.pods)
        return link, message.port

    async def _serve(self, link: PodLink, port: int) -> int:
        place, loop = self._place, asyncio.get_running_loop()
        over: asyncio.Future[OverMessage] = loop.create_future()
        lost: asyncio.Future[str] = loop.create_future()
        followers = Followers(place.ranks(link.peer, port), place.kind, silent_s=self._silent_s, threads=place.threads)
        heartbeat = RankHeartbeat(self._silent_s)
        for rank, connection in followers.links().items():
            lose = _from_any_thread(loop, lost)
            heartbeat.add(f"rank {rank} of the learner", RankLink(connection), lose, starting=True)
        end = _from_any_thread(loop, over)
        link.listen(lambda message: _take(message, end), lambda fault: end(OverMessage(done=False, kill=True)))
        heartbeat.add("the trainer's first pod", link, lambda sentence: end(OverMessage(done=False, kill=True)))
        leaving = asyncio.ensure_future(self._send_when_asked(link))
        answers = self._answers()
        try:
            verdict = await self._verdict(followers, link, over=over, lost=lost)
        finally:
            leaving.cancel()
            heartbeat.close()
            if answers is not None:
                answers.close()
        if verdict is None or verdict.kill:
            followers.kill()
        await asyncio.to_thread(followers.close)
        link.close()
        log.info("this start of the group is over", verdict=verdict)
        if verdict is None:
            return TEMPORARY_EXIT
        return 0 if verdict.done else HANDED_OVER_EXIT

    def _answers(self) -> ShareAnswers | None:
        if self._share is None:
            return None
        return ShareAnswers(partial(PodLink.dial, self._place.leader, self._keys), self._place.pod, self._share)

    async def _verdict(
        self, followers: Followers, link: PodLink, *, over: asyncio.Future[OverMessage], lost: asyncio.Future[str]
    ) -> OverMessage | None:
        """What the first pod says at the end; None when it says nothing."""
        ended = asyncio.ensure_future(followers.first_end())
        anything: set[asyncio.Future[Any]] = {over, lost, ended}
        await asyncio.wait(anything, return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            # A rank that was let go ends a moment before, or after, its pod hears of it.
            code = ended.result().process.wait() if ended.done() else None
            if code != 0:
                reason = lost.result() if code is None else end_of(ended.result(), self._place.all_ranks)
                log.error("a rank of this pod is lost", reason=reason)
                link.send(LostMessage(reason[:REASON_CHARACTERS], echo=code == LOST_EXIT))
                followers.kill()
            await asyncio.wait({over}, timeout=VERDICT_S)
        ended.cancel()
        return over.result() if over.done() else None

    async def _send_when_asked(self, link: PodLink) -> None:
        """The first pod saves what was learned, and says when this one may end."""
        await self._asked.wait()
        link.send(LeavingMessage())


def _take(message: PodMessage, end: Callable[[OverMessage], None]) -> None:
    if isinstance(message, OverMessage):
        end(message)


def _from_any_thread(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]) -> Callable[[T], None]:
    """Sets the future's result, the first time."""

    def set_once(value: T) -> None:
        if not future.done():
            future.set_result(value)

    return lambda value: _call(loop, set_once, value)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], value: T) -> None:
    try:
        loop.call_soon_threadsafe(function, value)
    except RuntimeError:  # the loop is closed: all is over
        log.debug("a message came after the end")
