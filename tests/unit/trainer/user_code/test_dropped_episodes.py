"""A group may be dropped while one of its environments is asked: that ends the episode, and neither the run nor a place
of the pool's is lost with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.episodes import EpisodeFailed, EpisodeLost, Episodes, Move

TOKENIZER = CharacterTokenizer("0123456789")
SAMPLE = Sample(np.array([1]), np.array([0], np.float32), prompt_length=1, id="7.0", group=7)


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
        self.forget(SAMPLE.group)
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
        await episodes.play(SAMPLE, 0, lambda: ())
    assert asked.began == [SAMPLE.id], "nobody leads another one to where it was"
    assert not asked.open
    assert not episodes._rewards
