"""An environment that was lost with its trainer: a fresh one is led through the record, and must repeat it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from polyrl.errors import ProtocolError
from polyrl.sample import DiscardReason, Finish, Group, Purpose, Response, SamplingParams, Span
from polyrl.weights import WeightsRef
from polyrl.wire import pack_ids
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import EOS_ID, CharacterTokenizer
from polyrl_trainer.environments import CalculatorEnvironment, Ending, Environment
from polyrl_trainer.generation.from_wire import past_turns, scored_sample
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.sample import Sample
from polyrl_trainer.testing.fake_rollouts import FakeRollouts
from polyrl_trainer.user_code.episodes import Episodes
from polyrl_trainer.user_code.rewards import Failures
from polyrl_trainer.user_code.verdicts import Reward
from polyrl_trainer.user_code.workers.conversations import LocalConversations

TOKENIZER = CharacterTokenizer("0123456789=<>/+acelrstu")
PROMPT = Prompt("f:0", "1=", ids=tuple(TOKENIZER.encode_prompt("1=")), metadata={})
CALLS, GROUPS, N = 3, 3, 4
DEADLINE_S = 60.0


class Policy:
    """Calls the calculator with its last result, CALLS times; notes where it generated."""

    def __init__(self) -> None:
        self.began: list[tuple[int, int, int]] = []

    def __call__(self, group: Group, index: int, so_far: list[int]) -> list[int]:
        self.began.append((group.id, index, len(so_far)))
        results = TOKENIZER.decode(so_far).split("<result>")[1:]
        if len(results) == CALLS:
            return [*TOKENIZER.encode_text("7"), EOS_ID]
        last = results[-1].split("<")[0] if results else str(index)
        return [*TOKENIZER.encode_text(f"<calc>{last}+1</calc>"), EOS_ID]


class Calculator(CalculatorEnvironment):
    """Records what it is given, and calls `before` ahead of each text."""

    def __init__(self, before: Callable[[Sample, int], Any] | None = None) -> None:
        """`before(sample, number of the text)` gives None, or another text to write."""
        self.given: dict[str, list[Sample]] = {}
        self._before = before

    async def run(self, sample: Sample, generate: Any) -> None:
        mine = self.given.setdefault(sample.id, [sample])

        async def noted(text: str) -> Sample:
            replacement = await self._before(sample, len(mine) - 1) if self._before else None
            mine.append(await generate(replacement or text))
            return mine[-1]

        await super().run(sample, noted)


class Rewards:
    """Notes what it judges."""

    def __init__(self) -> None:
        self.scored: dict[str, Sample] = {}
        self.failures = Failures({}, {})

    async def score(self, sample: Sample, n: int) -> Reward:
        assert sample.id not in self.scored
        self.scored[sample.id] = sample
        return Reward(1.0)

    def forget(self, group: int) -> None:
        pass


@asynccontextmanager
async def a_trainer(rollouts: FakeRollouts, environment: Environment, rewards: Rewards):
    episodes = Episodes(LocalConversations(environment, DEADLINE_S), CALLS + 2, tokenizer=TOKENIZER)
    host = UserCodeRunner(rollouts, TOKENIZER, reward=rewards, episodes=episodes)
    for number in range(GROUPS):
        host.register(number, PROMPT, N)
    running = asyncio.create_task(host.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        host.release(range(GROUPS))


async def submit(rollouts: FakeRollouts) -> None:
    sampling = SamplingParams(200, stop_token_ids=(EOS_ID,))
    ids = pack_ids(PROMPT.ids)
    await rollouts.publish(WeightsRef(0))
    await rollouts.submit(
        [
            Group(
                number, 0, purpose=Purpose.TRAIN, prompt_ids=ids, n=N, sampling=sampling, min_version=0, max_version=0
            )
            for number in range(GROUPS)
        ]
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - the runner has no event for it
            await asyncio.sleep(0)


async def undisturbed() -> tuple[Calculator, Rewards]:
    rollouts, environment, rewards = FakeRollouts(Policy()), Calculator(), Rewards()
    async with a_trainer(rollouts, environment, rewards):
        await submit(rollouts)
        await until(lambda: len(rewards.scored) == GROUPS * N)
    return environment, rewards


async def until_stuck(rollouts: FakeRollouts, rewards: Rewards, reached: Callable[[str], int]) -> None:
    """A trainer that gets as far as `reached` says of each sample, and is gone."""
    stuck: set[str] = set()

    async def stop(sample: Sample, number: int) -> None:
        if number == reached(sample.id):
            stuck.add(sample.id)
            await asyncio.Event().wait()

    async with a_trainer(rollouts, Calculator(stop), rewards):
        await submit(rollouts)
        await until(lambda: len(stuck) + len(rewards.scored) == GROUPS * N)
    rollouts.ask_again()


def same(one: Sample, other: Sample) -> bool:
    fields = ("tokens", "loss_mask", "rollout_log_probs")
    assert (one.response, one.versions, one.prompt_length) == (other.response, other.versions, other.prompt_length)
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in fields)


@settings(max_examples=30, deadline=None, print_blob=True)
@given(reached=st.lists(st.integers(0, CALLS), min_size=N, max_size=N), seed=st.integers(0, 2**20))
def test_a_deterministic_environment_goes_on_and_nothing_is_generated_again(reached: list[int], seed: int) -> None:
    async def main() -> None:
        expected_given, expected = await undisturbed()
        policy, environment, rewards = Policy(), Calculator(), Rewards()
        rollouts = FakeRollouts(policy, seed=seed)
        await until_stuck(rollouts, rewards, lambda name: reached[int(name.split(".")[1])])
        async with a_trainer(rollouts, environment, rewards):
            await until(lambda: len(rewards.scored) == GROUPS * N)
        assert rollouts.discarded == {}
        assert len(policy.began) == len(set(policy.began)) == GROUPS * N * (CALLS + 1)
        for name, sample in expected.scored.items():
            assert same(rewards.scored[name], sample)
        for name, seen in environment.given.items():
            assert all(same(one, other) for one, other in zip(seen, expected_given.given[name], strict=True))

    asyncio.run(main())


@pytest.mark.parametrize("text", ["<result>0</result>", "not in the alphabet: é"])
@pytest.mark.parametrize("turn", range(CALLS - 1))
async def test_one_that_writes_something_else_has_a_reason_of_its_own_naming_the_turn(turn: int, text: str) -> None:
    async def other(sample: Sample, number: int) -> str | None:
        return text if number == turn else None

    policy, rewards, details = Policy(), Rewards(), []
    rollouts = FakeRollouts(policy)
    await until_stuck(rollouts, rewards, lambda name: CALLS - 1)
    began, reject = len(policy.began), rollouts.reject

    async def reject_and_note(sample: str, reason: DiscardReason, detail: str) -> None:
        details.append(detail)
        await reject(sample, reason, detail)

    rollouts.reject = reject_and_note  # type: ignore[method-assign]
    async with a_trainer(rollouts, Calculator(other), rewards):
        await until(lambda: len(rollouts.discarded) == GROUPS)
    assert set(rollouts.discarded.values()) == {DiscardReason.ENVIRONMENT_DIVERGED}
    assert rewards.scored == {}
    assert len(policy.began) == began
    assert all(f"wrote {text!r} after turn {turn}, and '<result>" in detail for detail in details)
    assert rewards.failures.counts.keys() == {"environmentDiverged"}


async def test_one_that_ends_sooner_has_diverged_too() -> None:
    class Silent(Calculator):
        async def run(self, sample: Sample, generate: Any) -> None:
            return

    rollouts, rewards = FakeRollouts(Policy()), Rewards()
    await until_stuck(rollouts, rewards, lambda name: 1)
    async with a_trainer(rollouts, Silent(), rewards):
        await until(lambda: len(rollouts.discarded) == GROUPS)
    assert set(rollouts.discarded.values()) == {DiscardReason.ENVIRONMENT_DIVERGED}


class Paying(CalculatorEnvironment):
    """Pays 1, 2, ... for turns, and cuts the episode after so many texts."""

    def __init__(self, texts: int) -> None:
        self._texts = texts

    async def run(self, sample: Sample, generate: Any) -> Ending:
        for number in range(self._texts):
            await generate(f"<result>{number}</result>", reward=number + 1)
        return Ending(reward=0.5, truncated=True)


class Stuck(Rewards):
    """Never judges."""

    async def score(self, sample: Sample, n: int) -> Reward:
        await super().score(sample, n)
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("texts", "paid", "finish"),
    [(2, (1, 2, 0.5), "length"), (CALLS + 2, (1, 2, 3, 4, 5), "length")],
    ids=["cut by the environment", "out of turns"],
)
async def test_what_turns_are_paid_and_that_an_episode_was_cut_is_there_for_the_reward(
    texts: int, paid: tuple[float, ...], finish: str, restarts: bool
) -> None:
    rollouts, rewards = FakeRollouts(Policy()), Rewards()
    if restarts:
        async with a_trainer(rollouts, Paying(texts), stuck := Stuck()):
            await submit(rollouts)
            await until(lambda: len(stuck.scored) == GROUPS * N)
        rollouts.ask_again()
    async with a_trainer(rollouts, Paying(texts), rewards):
        if not restarts:
            await submit(rollouts)
        await until(lambda: len(rewards.scored) == GROUPS * N)
        batch = await rollouts.next(
            0, purpose=Purpose.TRAIN, min_samples=1, max_samples=GROUPS * N, max_tokens=10**6, deadline_s=DEADLINE_S
        )
    assert {one.turn_rewards for one in rewards.scored.values()} == {paid}
    assert {one.finish_reason for one in rewards.scored.values()} == {finish}
    assert {scored_sample(one, PROMPT, TOKENIZER).finish_reason for one in batch.samples} == {finish}


@pytest.mark.parametrize("wrong", [float("nan"), "1", None, -1e300])
async def test_a_turns_reward_that_is_no_number_fails_the_episode(wrong: object) -> None:
    class Wrong(Calculator):
        async def run(self, sample: Sample, generate: Any) -> None:
            await generate("1", reward=wrong)

    rollouts, rewards = FakeRollouts(Policy()), Rewards()
    async with a_trainer(rollouts, Wrong(), rewards):
        await submit(rollouts)
        await until(lambda: len(rollouts.discarded) == GROUPS)
    assert set(rollouts.discarded.values()) == {DiscardReason.ENVIRONMENT_FAILED}
    assert "a turn's reward must be a finite number" in str(rewards.failures.first)


async def test_a_turns_reward_may_be_a_number_of_numpys() -> None:
    class Pays(Calculator):
        async def run(self, sample: Sample, generate: Any) -> Ending:
            await generate("1", reward=np.float32(0.5))
            return Ending(np.int64(2))

    rollouts, rewards = FakeRollouts(Policy()), Rewards()
    async with a_trainer(rollouts, Pays(), rewards):
        await submit(rollouts)
        await until(lambda: len(rewards.scored) == GROUPS * N)
    assert {one.turn_rewards for one in rewards.scored.values()} == {(0.5, 2.0)}


async def test_a_replay_ends_at_the_environments_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging: set[str] = set()

    async def hang(sample: Sample, number: int) -> None:
        if number == 1:
            hanging.add(sample.id)
            await asyncio.Event().wait()

    rollouts, rewards = FakeRollouts(Policy()), Rewards()
    await until_stuck(rollouts, rewards, lambda name: 2)
    async with a_trainer(rollouts, Calculator(hang), rewards):
        await until(lambda: len(hanging) == GROUPS * N)
        assert rollouts.discarded == {}
        # The loop's clock says that the deadline is over, without anybody's having waited: one so short that a test
        # waits for it is over before turn 1 on a crowded core.
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 2 * DEADLINE_S)
        await until(lambda: len(rollouts.discarded) == GROUPS)
    assert set(rollouts.discarded.values()) == {DiscardReason.ENVIRONMENT_FAILED}
    assert f"replayed in another process, after turn 1: no answer within {DEADLINE_S:g} s" in str(
        rewards.failures.first
    )


def response(turn: int, *spans: Span) -> Response:
    ids = TOKENIZER.encode_text("123456")
    mask = b"\1\1\0\0\0\1"
    return Response(
        "0.0", pack_ids(ids), logprobs=bytes(24), loss_mask=mask, spans=spans, turn=turn, finish=Finish.STOP
    )


def test_texts_that_touch_are_distinguished() -> None:
    """Between them lies a turn without a token: the engine had ended it at once."""
    parts = (
        Span(0, 2, version=4, engine="e", attempt=0),
        Span(2, 4, version=-1, engine="", attempt=0),
        Span(4, 5, version=-1, engine="", attempt=0),
        Span(5, 6, version=5, engine="e", attempt=1),
    )
    past = list(past_turns(0, 0, response(2, *parts), PROMPT, TOKENIZER))
    assert [one.sample.response for one in past] == ["12", "1234"]
    assert [TOKENIZER.decode(one.written) for one in past] == ["34", "5"]
    assert [one.sample.versions for one in past] == [(4,), (4,)]
    assert [one.sample.loss_mask.sum() for one in past] == [2, 2]


def test_a_record_that_lacks_a_turn_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"sample 0\.0: in turn 2, with 1 texts of its environment"):
        list(
            past_turns(
                0,
                0,
                response(2, Span(0, 2, version=4, engine="e", attempt=0), Span(2, 5, version=-1, engine="", attempt=0)),
                PROMPT,
                TOKENIZER,
            )
        )
