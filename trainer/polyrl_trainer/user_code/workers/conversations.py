"""Conversations of one process: each is the user's `environment.run`, a coroutine that waits, between its turns, for
the policy.

    next_move(turn k) ──Sample──> run(sample, generate) ──generate(text)──> text, and run waits for turn k + 1
                                                        └─returns─────────> None: the episode is over

All share the process's main thread. One that blocks it makes the others wait, which their deadlines do not count.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

from polyrl_trainer.environments.protocol import Ending, Environment
from polyrl_trainer.sample import MAX_REWARD, REWARD_WORDS, Sample
from polyrl_trainer.user_code.episodes import EpisodeFailed, Move
from polyrl_trainer.user_code.frames import describe
from polyrl_trainer.user_code.verdicts import finite
from polyrl_trainer.user_code.workers.forks import forked_children_end
from polyrl_trainer.user_code.workers.thread_use import ThreadUse


@dataclass(eq=False)
class _Conversation:
    """One running coroutine and its two mailboxes: turns in, texts out."""

    turns: asyncio.Queue[Sample] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    moves: asyncio.Queue[Move] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    task: asyncio.Task[None] | None = None
    process: int = field(default_factory=os.getpid)

    async def generate(self, text: str, reward: float = 0.0) -> Sample:
        if os.getpid() != self.process:
            os._exit(0)  # a child that the environment forked: its parent plays
        if not isinstance(text, str) or not text:
            raise ValueError(f"generate() takes the text that the environment writes, got {text!r:.80}")
        text.encode()  # half a surrogate pair is legal in a Python text, and nowhere that it is sent to
        await self.moves.put(Move(text, _number(reward)))
        return await self.turns.get()

    async def run(self, environment: Environment, sample: Sample) -> None:
        try:
            with forked_children_end():
                ending = await environment.run(sample, self.generate)
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, with all others' conversations
            raise RuntimeError(type(error).__name__) from error
        if not isinstance(ending, Ending | None):
            raise TypeError(f"run() must return None or an Ending, got {ending!r:.80}")
        ending = ending or Ending()
        await self.moves.put(Move(None, _number(ending.reward), truncated=bool(ending.truncated)))


@dataclass(eq=False)
class LocalConversations:
    """See `episodes.Conversations`."""

    environment: Environment
    timeout_s: float
    thread: ThreadUse = field(default_factory=ThreadUse)
    _running: dict[str, _Conversation] = field(default_factory=dict)

    def runs(self, name: str) -> bool:
        """Whether its environment is here, and waits for a turn."""
        return name in self._running

    async def next_move(self, sample: Sample, *, begins: bool) -> Move:
        """Raises EpisodeFailed."""
        if begins:
            conversation = self._running[sample.id] = _Conversation()
            conversation.task = self.thread.start(sample.id, conversation.run(self.environment, sample))
        else:
            conversation = self._running[sample.id]
            conversation.turns.put_nowait(sample)
        assert conversation.task is not None
        move = asyncio.ensure_future(conversation.moves.get())
        try:
            await self._within_its_time(sample.id, move, conversation.task)
            if move.done() or not conversation.moves.empty():
                return await move
        finally:
            move.cancel()
        if self._running.get(sample.id) is not conversation:
            raise asyncio.CancelledError("it was ended")
        self.end(sample.id)
        raise EpisodeFailed(self._what_is_wrong(conversation.task))

    async def _within_its_time(self, name: str, move: asyncio.Future[Move], task: asyncio.Task[None]) -> None:
        """Until there is a move, the coroutine is over, or it had its time, in which the thread was not another's."""
        loop = asyncio.get_running_loop()
        began = loop.time() - self.thread.seconds_of_others(name)
        left = self.timeout_s
        while left > 0:
            either: set[asyncio.Future[Any]] = {move, task}
            done, _ = await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            left = self.timeout_s - (loop.time() - self.thread.seconds_of_others(name) - began)

    def _what_is_wrong(self, task: asyncio.Task[None]) -> str:
        if not task.done():
            return f"no answer within {self.timeout_s:g} s"
        error = None if task.cancelled() else task.exception()
        return describe(error) if error else "it cancelled itself"

    def end(self, name: str) -> None:
        """The episode is over, or nobody asks for it any more."""
        conversation = self._running.pop(name, None)
        if conversation is not None and conversation.task is not None:
            conversation.task.cancel()
            self.thread.forget(name)


def _number(reward: object) -> float:
    """Raises ValueError."""
    number = finite(reward)
    if number is None or abs(number) > MAX_REWARD:
        raise ValueError(f"a turn's reward must be {REWARD_WORDS}, got {reward!r:.80}")
    return number
