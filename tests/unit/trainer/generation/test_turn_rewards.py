"""An environment's rewards for turns, from the host of user code to the learner."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.sample import DiscardReason, Finish, Purpose, Response, Scored, Span
from polyrl.wire import TurnDone, excess_of_metrics, pack_ids
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.generation.from_wire import scored_sample, turn_reward_metrics, with_unpaid_turns
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.loops.step_metrics import mean_metrics
from polyrl_trainer.losses import with_advantages
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.episodes import Played
from polyrl_trainer.user_code.rewards import CustomGroupFilter, RewardFunction
from polyrl_trainer.user_code.verdicts import Reward, Verdict

TOKENIZER = CharacterTokenizer("abcdef")


def scored(metrics: dict[str, float]) -> Scored:
    """Three tokens of the policy, two of the environment, a turn without any, one of each."""
    edges = [(0, 3, 5), (3, 5, -1), (5, 6, -1), (6, 7, 6)]
    spans = tuple(Span(start, end, version=version, engine="e", attempt=1) for start, end, version in edges)
    mask = np.array([1, 1, 1, 0, 0, 0, 1], dtype=np.uint8).tobytes()
    response = Response(
        "4.0",
        pack_ids([3, 4, 5, 6, 7, 3, 4]),
        logprobs=bytes(28),
        loss_mask=mask,
        spans=spans,
        turn=2,
        finish=Finish.STOP,
    )
    return Scored(4, 0, response=response, reward=1.0, metrics=metrics)


def test_turns_begin_where_the_environments_texts_end() -> None:
    prompt = Prompt("f:1", "a", (1, 3), metadata={})
    sample = scored_sample(scored(turn_reward_metrics([0.5, 0.0, -2.0])), prompt, TOKENIZER)
    assert sample.turn_starts == (2, 7, 8)
    assert sample.turn_rewards == (0.5, 0.0, -2.0)
    assert scored_sample(scored({"exact_match": 1.0}), prompt, TOKENIZER).turn_rewards == ()


def test_a_text_that_left_no_room_for_a_turn_begins_none() -> None:
    """The context ended with it: what came of the sample is compared with siblings at the turn that it had."""
    whole = scored({})
    response = msgspec.structs.replace(
        whole.response,
        ids=whole.response.ids[: 4 * 5],
        logprobs=bytes(20),
        loss_mask=whole.response.loss_mask[:5],
        spans=whole.response.spans[:2],
        turn=1,
        finish=Finish.LENGTH,
    )
    prompt = Prompt("f:1", "a", (1, 3), metadata={})
    cut = scored_sample(msgspec.structs.replace(whole, response=response), prompt, TOKENIZER)
    assert cut.turn_starts == (2,)
    siblings = [cut, scored_sample(scored({}), prompt, TOKENIZER)]
    _, other = with_advantages(siblings, AlgorithmSpec.model_validate({"advantage": "turnNorm"}))
    assert other.advantages is not None
    assert other.advantages[-1] == 0, "it alone had a third turn"


def test_turns_that_gave_nothing_take_no_room() -> None:
    assert turn_reward_metrics([0.0, 1.5, 0.0]) == {"turn_reward/1": 1.5}


def test_a_turn_that_was_not_paid_counts_in_the_mean_of_that_turn() -> None:
    """Else an environment that pays 1 or nothing would show 1, whatever its policy does."""
    rows = [with_unpaid_turns(scored(paid)) for paid in ({"turn_reward/0": 1.0}, {}, {"turn_reward/2": 3.0, "x": 5.0})]
    means = mean_metrics(rows, prefix="reward/")
    assert means == {"reward/turn_reward/0": 1 / 3, "reward/turn_reward/2": 1.0, "reward/x": 5.0}
    whole = scored({})
    one_turn = msgspec.structs.replace(whole.response, spans=whole.response.spans[:1])
    rows.append(with_unpaid_turns(msgspec.structs.replace(whole, response=one_turn)))
    assert mean_metrics(rows, prefix="")["turn_reward/2"] == 1.0, "it had no such turn"


class Ended:
    """An environment that pays the first turn and cuts the episode there."""

    async def play(self, *_: Any, **__: Any) -> Played:
        return Played(None, (0.5,), truncated=True)


class OneTurn:
    """A rollout side with one finished turn."""

    def __init__(self, turn: TurnDone) -> None:
        self._turn = turn
        self.metrics: list[dict[str, float]] = []
        self.rejected: list[tuple[DiscardReason, str]] = []

    async def turns(self) -> Any:
        yield self._turn

    async def score(self, sample: str, turn: int, reward: float, metrics: dict[str, float]) -> None:
        assert not excess_of_metrics(metrics), "it would end the run"
        self.metrics.append(metrics)

    async def reject(self, sample: str, reason: DiscardReason, detail: str) -> None:
        self.rejected.append((reason, detail))


def finished_turn() -> TurnDone:
    response = Response("4.0", pack_ids([3]), logprobs=bytes(4), loss_mask=b"\1", spans=(), turn=0, finish=Finish.STOP)
    return TurnDone(4, 0, purpose=Purpose.TRAIN, step=1, response=response)


class Asked:
    """Notes what a function of the user's was shown."""

    def __init__(self, verdict: Verdict | None) -> None:
        self.samples: list[Sample] = []
        self._verdict = verdict

    async def call(self, samples: list[Sample], timeout_s: float) -> list[Verdict | None]:
        self.samples += samples
        return [self._verdict] * len(samples)


async def test_a_reward_whose_numbers_leave_no_room_for_the_environments_is_a_typed_discard() -> None:
    numbers = {f"part{number:03}": 1.0 for number in range(355)}
    assert not excess_of_metrics(numbers), "by themselves they are carried"
    rollouts = OneTurn(finished_turn())
    reward = RewardFunction(Asked(Reward(1.0, numbers)), timeout_s=1)
    host = UserCodeRunner(rollouts, TOKENIZER, reward, episodes=Ended())  # type: ignore[arg-type]
    host.register(4, Prompt("f:1", "a", (1, 3), metadata={}), 1)
    await host.run()
    ((reason, detail),) = rollouts.rejected
    assert reason is DiscardReason.REWARD_INVALID
    assert "with those of the environment take 8202 bytes" in detail
    assert reward.failures.counts == {"rewardInvalid": 1}


@pytest.mark.parametrize(
    ("fields", "paid"),
    [
        pytest.param({}, {}, id="an advantage of the reward at the end"),
        pytest.param({"advantage": "turnNorm"}, {"turn_reward/0": 0.5}, id="one per turn"),
        pytest.param({"advantageFunction": "own:best"}, {"turn_reward/0": 0.5}, id="one of the user's own"),
    ],
)
async def test_a_group_filter_sees_of_an_episode_what_the_reward_saw_and_the_learner_what_it_learns_from(
    fields: dict[str, str], paid: dict[str, float]
) -> None:
    rollouts = OneTurn(finished_turn())
    scored, filtered = Asked(Reward(1.0)), Asked(None)
    group_filter = CustomGroupFilter(filtered, timeout_s=1, samples_per_group=1)
    reward = RewardFunction(scored, timeout_s=1)
    host = UserCodeRunner(rollouts, TOKENIZER, reward, episodes=Ended(), group_filter=group_filter)  # type: ignore[arg-type]
    host.keeps_turn_rewards = AlgorithmSpec.model_validate(fields).learns_from_turns
    host.register(4, Prompt("f:1", "a", (1, 3), metadata={}), 1)
    await host.run()
    for shown in scored.samples + filtered.samples:
        assert (shown.finish_reason, shown.turn_rewards) == ("length", (0.5,))
    assert [shown.reward for shown in filtered.samples] == [1.0]
    assert rollouts.metrics == [{"environment_truncated": 1.0, **paid}]
