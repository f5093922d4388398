"""Conversations of one process: each is the user's `environment.run`, a coroutine that waits, between its turns, for
the policy.

    next_text(turn k) ──Sample──> run(sample, generate) ──generate(text)──> text, and run waits for turn k + 1
                                                        └─returns─────────> None: the episode is over

All share the process's main thread. One that blocks it makes the others wait, which their deadlines do not count.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from polyrl_trainer.environments.protocol import Environment
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.episodes import EpisodeFailed
from polyrl_trainer.user_code.frames import describe
from polyrl_trainer.user_code.workers.thread_use import ThreadUse


@dataclass(eq=False)
class _Conversation:
    """One running coroutine and its two mailboxes: turns in, texts out."""

    turns: asyncio.Queue[Sample] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    texts: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    task: asyncio.Task[None] | None = None

    async def generate(self, text: str) -> Sample:
        if not isinstance(text, str) or not text:
            raise ValueError(f"generate() takes the text that the environment writes, got {text!r:.80}")
        text.encode()  # half a surrogate pair is legal in a Python text, and nowhere that it is sent to
        await self.texts.put(text)
        return await self.turns.get()

    async def run(self, environment: Environment, sample: Sample) -> None:
        try:
            await environment.run(sample, self.generate)
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, with all others' conversations
            raise RuntimeError(type(error).__name__) from error
        await self.texts.put(None)


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

    async def next_text(self, sample: Sample, *, begins: bool) -> str | None:
        """Raises EpisodeFailed."""
        if begins:
            conversation = self._running[sample.id] = _Conversation()
            conversation.task = self.thread.start(sample.id, conversation.run(self.environment, sample))
        else:
            conversation = self._running[sample.id]
            conversation.turns.put_nowait(sample)
        assert conversation.task is not None
        text = asyncio.ensure_future(conversation.texts.get())
        try:
            await self._within_its_time(sample.id, text, conversation.task)
            if text.done() or not conversation.texts.empty():
                return await text
        finally:
            text.cancel()
        if self._running.get(sample.id) is not conversation:
            raise asyncio.CancelledError("it was ended")
        self.end(sample.id)
        raise EpisodeFailed(self._what_is_wrong(conversation.task))

    async def _within_its_time(self, name: str, text: asyncio.Future[str | None], task: asyncio.Task[None]) -> None:
        """Until there is a text, the coroutine is over, or it had its time, in which the thread was not another's."""
        loop = asyncio.get_running_loop()
        began = loop.time() - self.thread.seconds_of_others(name)
        left = self.timeout_s
        while left > 0:
            either: set[asyncio.Future[Any]] = {text, task}
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
