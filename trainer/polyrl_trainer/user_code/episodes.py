"""Plays multi-turn episodes: each sample's `environment.run` is a coroutine that waits, between its turns, for the
engine.

    play(turn k) ──Sample──> run(sample, generate) ──generate(text)──> play returns text, and run waits for turn k + 1
                                                   └─returns─────────> play returns None: the episode is over

A sample that an earlier trainer left in its second turn or beyond has no environment any more. A fresh one is
*replayed*: it is led through the recorded turns, and what it writes must be what the record holds, token for token;
nothing is generated for that. Then it goes on as any other. Each text of a replay has the deadline that it has
otherwise.

Environments run on the trainer's event loop: they must await, not block; long computing belongs in a thread of
their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyrl.errors import InvalidCode, InvalidData
from polyrl.manifest.recipe import EnvironmentSpec
from polyrl.sample import DiscardReason, split_sample_id
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.environments.protocol import Environment
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.frames import describe
from polyrl_trainer.user_code.loading import check_arity, load_object


class EpisodeFailed(Exception):
    """The environment raised, hung, or did not repeat itself; the sample is discarded with `reason`."""

    def __init__(self, detail: str, reason: DiscardReason = DiscardReason.ENVIRONMENT_FAILED) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class PastTurn:
    """A turn that the environment has answered already."""

    sample: Sample
    """As it was when the turn ended."""
    written: list[int]
    """The environment's tokens after it."""


@dataclass(eq=False)
class _Episode:
    """One running coroutine and its two mailboxes: turns in, texts out."""

    turns: asyncio.Queue[Sample] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    texts: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    task: asyncio.Task[None] | None = None

    async def generate(self, text: str) -> Sample:
        if not isinstance(text, str) or not text:
            raise ValueError(f"generate() takes the text that the environment writes, got {text!r:.80}")
        await self.texts.put(text)
        return await self.turns.get()


@dataclass(eq=False)
class Episodes:
    """All episodes that run now."""

    environment: Environment
    spec: EnvironmentSpec
    tokenizer: Tokenizer
    _running: dict[str, _Episode] = field(default_factory=dict)

    async def play(self, sample: Sample, turn: int, past: Iterable[PastTurn] = ()) -> str | None:
        """What the environment writes after `turn`, or None when the episode is over. Raises EpisodeFailed.

        `past`: the turns before, read only if this sample's environment does not run here.
        """
        if turn + 1 >= self.spec.max_turns:
            self._end(sample.id)
            return None
        episode = self._running.get(sample.id)
        if episode is not None:
            episode.turns.put_nowait(sample)
        elif turn == 0:
            episode = self._start(sample)
        else:
            episode = await self._replay(sample, past)
        text = await self._next_text(sample.id, episode)
        if text is None:
            self._end(sample.id)
        else:
            self._check(sample.id, text)
        return text

    def forget(self, group: int) -> None:
        """Ends the episodes of a group that is trained or dropped."""
        for name in [name for name in self._running if split_sample_id(name)[0] == group]:
            self._end(name)

    async def _replay(self, sample: Sample, past: Iterable[PastTurn]) -> _Episode:
        """A fresh environment that has been led to where `sample` is. Raises EpisodeFailed."""
        episode: _Episode | None = None
        for turn, recorded in enumerate(past):
            if episode is None:
                episode = self._start(recorded.sample)
            else:
                episode.turns.put_nowait(recorded.sample)
            try:
                text = await self._next_text(sample.id, episode)
            except EpisodeFailed as failed:
                raise EpisodeFailed(f"replayed after a restart, after turn {turn}: {failed.detail}") from failed
            self._compare(sample.id, turn, text, recorded.written)
        assert episode is not None, "a sample beyond its first turn has past turns"
        episode.turns.put_nowait(sample)
        return episode

    def _compare(self, name: str, turn: int, text: str | None, written: list[int]) -> None:
        """Raises EpisodeFailed with reason environmentDiverged."""
        try:
            if text is not None and list(self.tokenizer.encode_text(text)) == written:
                return
        except InvalidData:
            pass  # What cannot be encoded was not written before either.
        self._end(name)
        now = "ended the episode" if text is None else f"wrote {text!r:.80}"
        before = self.tokenizer.decode(written)
        raise EpisodeFailed(
            f"replayed after a restart, the environment {now} after turn {turn}, and {before!r:.80} before",
            DiscardReason.ENVIRONMENT_DIVERGED,
        )

    def _start(self, sample: Sample) -> _Episode:
        episode = _Episode()
        episode.task = asyncio.create_task(self._run(self.environment.run(sample, episode.generate), episode))
        self._running[sample.id] = episode
        return episode

    async def _run(self, coroutine: Coroutine[Any, Any, None], episode: _Episode) -> None:
        await coroutine
        await episode.texts.put(None)

    async def _next_text(self, name: str, episode: _Episode) -> str | None:
        assert episode.task is not None
        text = asyncio.ensure_future(episode.texts.get())
        timeout = self.spec.timeout_seconds
        try:
            await asyncio.wait({text, episode.task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if text.done() or not episode.texts.empty():
                return await text
        finally:
            text.cancel()
        error = None if not episode.task.done() else episode.task.exception()
        self._end(name)
        raise EpisodeFailed(describe(error) if error else f"no answer within {timeout} s")

    def _check(self, name: str, text: str) -> None:
        try:
            self.tokenizer.encode_text(text)
        except InvalidData as error:
            self._end(name)
            raise EpisodeFailed(f"the environment's text cannot be encoded: {error}") from error

    def _end(self, name: str) -> None:
        episode = self._running.pop(name, None)
        if episode is not None and episode.task is not None:
            episode.task.cancel()


def load_environment(spec: EnvironmentSpec, code_path: Path) -> Environment:
    """Raises InvalidCode naming the class and what it lacks."""
    made = load_object(spec.class_path, code_path)
    if not isinstance(made, type):
        raise InvalidCode(f"{spec.class_path}: must be a class with `async def run(self, sample, generate)`")
    check_arity(spec.class_path, made, 0)
    try:
        environment = made()
    except Exception as error:  # User code may raise anything.
        raise InvalidCode(f"{spec.class_path}: making it raised {describe(error)}") from error
    if not asyncio.iscoroutinefunction(getattr(environment, "run", None)):
        raise InvalidCode(f"{spec.class_path}: has no `async def run(self, sample, generate)`")
    check_arity(f"{spec.class_path}.run", environment.run, 2)
    return environment  # type: ignore[no-any-return]
