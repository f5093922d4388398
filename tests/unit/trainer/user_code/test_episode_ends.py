"""How an episode ends. An environment is asked after each turn of the policy, the last one too; where it would go on,
the episode is cut. A group may be dropped while one of its environments is asked: that ends the episode, and neither
the run nor a place in the pool is lost with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.environments import Ending, Environment
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.episodes import EpisodeFailed, EpisodeLost, Episodes, Move, PastTurn, Played
from polyrl_trainer.user_code.workers.conversations import LocalConversations

TOKENIZER = CharacterTokenizer("0123456789 no!")
FIRST = Sample(np.array([1]), np.array([0], np.float32), 1, id="0/0", response="0")
TEXT = " no!"
MAX_TURNS = 3
DEADLINE_S = 60.0


class Game:
    """Pays 1, 2, 4 ... for turns, and ends when it has seen as many as it was made for."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def run(self, sample: Sample, generate: Any) -> Ending:
        for turn in range(self._turns - 1):
            await generate(TEXT, reward=2.0**turn)
        return Ending(reward=2.0 ** (self._turns - 1))


@asynccontextmanager
async def playing(environment: Environment) -> AsyncIterator[tuple[Episodes, LocalConversations]]:
    conversations = LocalConversations(environment, DEADLINE_S)
    episodes = Episodes(conversations, MAX_TURNS, tokenizer=TOKENIZER)
    yield episodes, conversations
    episodes.forget(0)


async def played_to_its_end(episodes: Episodes) -> tuple[int, Played]:
    """Turns that the policy wrote, and how it ended."""
    for turn in range(2 * MAX_TURNS):
        played = await episodes.play(replace(FIRST, response=str(turn)), turn, lambda: ())
        if played.text is None:
            return turn + 1, played
    pytest.fail("the episode goes on beyond its turns")


@pytest.mark.parametrize(
    ("turns", "written", "paid", "cut"),
    [
        pytest.param(1, 1, (1.0,), False, id="ends at once"),
        pytest.param(3, 3, (1.0, 2.0, 4.0), False, id="ends by its last turn, which is paid"),
        pytest.param(4, 3, (1.0, 2.0, 4.0), True, id="one turn too long"),
        pytest.param(9, 3, (1.0, 2.0, 4.0), True, id="far too long"),
    ],
)
async def test_the_last_turn_is_paid_and_what_would_go_on_is_cut(
    turns: int, written: int, paid: tuple[float, ...], cut: bool
) -> None:
    async with playing(Game(turns)) as (episodes, conversations):
        assert await played_to_its_end(episodes) == (written, Played(None, paid, truncated=cut))
        assert not conversations.runs(FIRST.id), "nobody asks for it any more"


async def test_a_sample_without_room_is_not_cut_once_more() -> None:
    async with playing(Game(9)) as (episodes, _):
        await episodes.play(FIRST, 0, lambda: ())
        assert await episodes.play(FIRST, 1, lambda: (), is_over=True) == Played(None, (1.0,))


async def test_the_last_turn_is_answered_after_a_replay_as_well() -> None:
    past = [PastTurn(FIRST, list(TOKENIZER.encode_text(TEXT))) for _ in range(MAX_TURNS - 1)]
    async with playing(Game(9)) as (episodes, _):
        played = await episodes.play(FIRST, MAX_TURNS - 1, lambda: past)
        assert played == Played(None, (1.0, 2.0, 4.0), truncated=True)


# --- of a group that is dropped ---------------------------------------------------------------------------------------

DROPPED_GROUP = 7
DROPPED = replace(FIRST, id=f"{DROPPED_GROUP}.0")


class Asked:
    """Environments whose sample's group is dropped just as they answer, as `answer` does."""

    def __init__(self, answer: Callable[[], Move]) -> None:
        self.answer = answer
        self.forget: Callable[[int], None] = lambda _: None
        self.began: list[str] = []
        self.open: set[str] = set()

    def runs(self, name: str) -> bool:
        return name in self.open

    async def next_move(self, sample: Sample, *, begins: bool) -> Move:
        self.began.append(sample.id)
        assert len(self.began) < 3, "nobody asks for it any more"
        self.forget(DROPPED_GROUP)
        self.open.add(sample.id)  # as one does that waited for its worker meanwhile
        return self.answer()

    def end(self, name: str) -> None:
        self.open.discard(name)


def lost() -> Move:
    raise EpisodeLost("its worker has ended", at_fault=False)


def failed() -> Move:
    raise EpisodeFailed("KeyError")


@pytest.mark.parametrize(
    ("answer", "ends_by"),
    [
        pytest.param(lambda: Move("1"), asyncio.CancelledError, id="goes on"),
        pytest.param(lambda: Move(None), asyncio.CancelledError, id="is over"),
        pytest.param(lost, asyncio.CancelledError, id="is lost with its worker"),
        pytest.param(failed, EpisodeFailed, id="has failed"),
    ],
)
async def test_a_group_that_is_dropped_as_its_environment_answers_ends_the_episode_alone(
    answer: Callable[[], Move], ends_by: type[BaseException]
) -> None:
    asked = Asked(answer)
    episodes = Episodes(asked, 8, tokenizer=TOKENIZER)
    asked.forget = episodes.forget
    with pytest.raises(ends_by):
        await episodes.play(DROPPED, 0, lambda: ())
    assert asked.began == [DROPPED.id], "nobody leads another one to where it was"
    assert not asked.open
    assert not episodes._rewards
