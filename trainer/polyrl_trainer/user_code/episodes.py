"""Plays multi-turn episodes: each sample's environment waits, between its turns, for the engine.

    play(turn k) ──Sample──> its conversation, in a worker process ──text──> play returns it
                                                                   └─over──> play returns None

A sample whose environment was lost in its second turn or beyond, with an earlier trainer or with its worker, gets a
fresh one that is *replayed*: it is led through the recorded turns, and what it writes must be what the record holds,
token for token; nothing is generated for that. Then it goes on as any other. Each text of a replay has the deadline
that it has otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from polyrl.errors import InvalidData
from polyrl.sample import DiscardReason, split_sample_id
from polyrl_trainer.sample import Sample

if TYPE_CHECKING:
    # It loads the manifest's models, and every worker of user code loads this.
    from polyrl_trainer.data.tokenizers import Tokenizer

MAX_DEATHS: Final = 2
"""Workers that may die while one sample's environment holds their thread; it is discarded with the last."""


class EpisodeFailed(Exception):
    """The environment raised, hung, or did not repeat itself; the sample is discarded with `reason`."""

    def __init__(self, detail: str, reason: DiscardReason = DiscardReason.ENVIRONMENT_FAILED) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class EpisodeLost(Exception):
    """The environment's process ended; the sample's turns are there, and another one may be led through them."""

    def __init__(self, detail: str, *, at_fault: bool) -> None:
        """`at_fault`: it may be this environment that ended the process."""
        super().__init__(detail)
        self.at_fault = at_fault


@dataclass(frozen=True)
class PastTurn:
    """A turn that the environment has answered already."""

    sample: Sample
    """As it was when the turn ended."""
    written: list[int]
    """The environment's tokens after it."""


@dataclass(frozen=True)
class Move:
    """An environment's answer to a turn."""

    text: str | None
    """None: the episode is over."""
    reward: float = 0.0
    truncated: bool = False
    """The episode was cut."""


@dataclass(frozen=True)
class Played:
    """Where an episode is."""

    text: str | None
    """What the environment wrote; None: the episode is over."""
    turn_rewards: tuple[float, ...] = ()
    truncated: bool = False


class Conversations(Protocol):
    """Environments that run; the port behind which worker processes stand (see `workers.environments`)."""

    def runs(self, name: str) -> bool:
        """Whether this sample's environment is alive, and waits for a turn."""

    async def next_move(self, sample: Sample, *, begins: bool) -> Move:
        """What it answers to the sample's last turn. `begins`: a fresh one plays. Raises
        EpisodeFailed, EpisodeLost, and RunFailed when none can run any more."""

    def end(self, name: str) -> None:
        """The episode is over, or nobody asks for it any more."""


@dataclass(eq=False)
class Episodes:
    """All episodes that run now."""

    conversations: Conversations
    max_turns: int
    """Turns of the policy; where the environment would go on after the last one, the episode is cut."""
    tokenizer: Tokenizer
    _rewards: dict[str, list[float]] = field(default_factory=dict)
    """Rewards of each sample whose episode runs: one for each turn that was answered."""

    async def play(
        self, sample: Sample, turn: int, past: Callable[[], Iterable[PastTurn]], *, is_over: bool = False
    ) -> Played:
        """What the environment answers to `turn`. Raises EpisodeFailed.

        `past`: the turns before, read only if this sample's environment does not run. `is_over`: the sample has no
        room for another turn, so that the environment is not asked.
        """
        try:
            played = await self._play(sample, turn, past, is_over=is_over)
            self.tokenizer.encode_text(played.text or "")
        except EpisodeFailed:
            self._end(sample.id)
            raise
        except InvalidData as error:
            self._end(sample.id)
            raise EpisodeFailed(f"the environment's text cannot be encoded: {error}") from error
        if played.text is None:
            self._end(sample.id)
        return played

    def forget(self, group: int) -> None:
        """Ends the episodes of a group that is trained or dropped."""
        for name in [name for name in self._rewards if split_sample_id(name)[0] == group]:
            self._end(name)

    async def _play(
        self, sample: Sample, turn: int, past: Callable[[], Iterable[PastTurn]], *, is_over: bool
    ) -> Played:
        deaths = 0
        while True:
            try:
                if turn > 0 and not self.conversations.runs(sample.id):
                    await self._replay(sample.id, past())
                move = Move(None) if is_over else await self._move(sample, begins=turn == 0)
                # The last turn is answered like any other: its environment may end by it, and say what it was worth.
                is_truncated = move.text is not None and turn + 1 >= self.max_turns
                rewards = tuple(self._rewards.get(sample.id, ()))
                return Played(None if is_truncated else move.text, rewards, truncated=move.truncated or is_truncated)
            except EpisodeLost as lost:
                self._require_wanted(sample.id)
                deaths += lost.at_fault
                if deaths == MAX_DEATHS:
                    raise EpisodeFailed(f"{lost}, {MAX_DEATHS} times") from lost

    async def _move(self, sample: Sample, *, begins: bool) -> Move:
        if begins:
            self._rewards[sample.id] = []
        move = await self.conversations.next_move(sample, begins=begins)
        self._require_wanted(sample.id)
        self._rewards[sample.id].append(move.reward)
        return move

    def _require_wanted(self, name: str) -> None:
        """Its group may have been dropped meanwhile: just as the answer came, or while a worker was awaited, on which
        it has begun all the same. Raises CancelledError, which ends its task and nothing else."""
        if name not in self._rewards:
            self.conversations.end(name)
            raise asyncio.CancelledError("its group was dropped")

    async def _replay(self, name: str, past: Iterable[PastTurn]) -> None:
        """Leads a fresh environment to where the record ends. Raises EpisodeFailed, EpisodeLost."""
        for turn, recorded in enumerate(past):
            try:
                text = (await self._move(recorded.sample, begins=turn == 0)).text
            except EpisodeFailed as failed:
                raise EpisodeFailed(f"replayed in another process, after turn {turn}: {failed.detail}") from failed
            if not self._is_written(text, recorded.written):
                now = "ended the episode" if text is None else f"wrote {text!r:.80}"
                before = self.tokenizer.decode(recorded.written)
                raise EpisodeFailed(
                    f"replayed in another process, the environment {now} after turn {turn}, and {before!r:.80} before",
                    DiscardReason.ENVIRONMENT_DIVERGED,
                )

    def _is_written(self, text: str | None, written: list[int]) -> bool:
        try:
            return text is not None and list(self.tokenizer.encode_text(text)) == written
        except InvalidData:
            return False  # what cannot be encoded was not written before either

    def _end(self, name: str) -> None:
        self._rewards.pop(name, None)
        self.conversations.end(name)
