"""Hosts the user's code: each finished turn becomes an environment's move or a reward, and the answer goes back.

manager ──TurnDone──> UserCodeRunner ──Sample──> environment ──text──> Extend
                          └───────Sample──> reward ─────number──> Score, or Reject with its typed reason
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from polyrl.sample import DiscardReason, Finish, Purpose, split_sample_id
from polyrl.wire import TurnDone, excess_of_metrics
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.generation.from_wire import TRUNCATED, past_turns, to_sample, turn_reward_metrics
from polyrl_trainer.generation.stops import up_to_stop
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.episodes import EpisodeFailed, Episodes, PastTurn, Played
from polyrl_trainer.user_code.rewards import CustomGroupFilter, RewardFunction, ScoredTurn
from polyrl_trainer.user_code.verdicts import Reward, Unscored, Verdict


@dataclass
class GroupRecord:
    """What the trainer remembers of a group until it is released."""

    prompt: Prompt
    n: int
    """Samples of it."""
    answered: set[tuple[int, int]] = field(default_factory=set)
    """(index, turn) pairs that are being answered or were."""
    last_turn_at: float = 0.0
    """Monotonic time of the newest finished turn; 0 before the first."""
    rewards: dict[int, float] = field(default_factory=dict)
    """By index, before any filter."""


@dataclass(eq=False)
class UserCodeRunner:
    """Consumes turns for as long as the run lives."""

    rollouts: Rollouts
    tokenizer: Tokenizer
    reward: RewardFunction
    judges: Mapping[str, RewardFunction] = field(default_factory=dict)
    """By evaluation set, where it has a reward of its own."""
    episodes: Episodes | None = None
    group_filter: CustomGroupFilter | None = None
    stop: Sequence[str] = ()
    """Strings that end a response."""
    keeps_turn_rewards: bool = False
    """The advantage is of the environment's rewards too."""
    adopted: Container[int] = ()
    """Groups of an earlier trainer, whose turns may come before they are registered."""
    _early: dict[int, list[TurnDone]] = field(default_factory=dict)
    """Turns of adopted groups that nobody has registered yet."""
    _tasks: asyncio.TaskGroup | None = None
    _groups: dict[int, GroupRecord] = field(default_factory=dict)

    def register(self, group: int, prompt: Prompt, n: int) -> None:
        """Before the group is submitted."""
        self._groups[group] = GroupRecord(prompt, n)
        for turn in self._early.pop(group, ()):
            self._take(turn)

    def release(self, groups: Iterable[int]) -> None:
        """These groups are trained or dropped."""
        for group in groups:
            self._groups.pop(group, None)
            self._early.pop(group, None)
            if self.episodes is not None:
                self.episodes.forget(group)
            for reward in (self.reward, *self.judges.values()):
                reward.forget(group)
            if self.group_filter is not None:
                self.group_filter.forget(group)

    def last_turn_at(self, groups: Iterable[int]) -> float:
        """Monotonic time of the newest finished turn of these groups; 0 when none has one."""
        return max((self._groups[group].last_turn_at for group in groups if group in self._groups), default=0.0)

    def rewards_of(self, group: int) -> list[float]:
        """What was scored of it by this trainer."""
        return list(self._groups[group].rewards.values()) if group in self._groups else []

    async def run(self) -> None:
        """Ends when the stream of turns ends; raises what ends the run."""
        async with asyncio.TaskGroup() as self._tasks:
            async for turn in self.rollouts.turns():
                self._take(turn)

    def _take(self, turn: TurnDone) -> None:
        record = self._groups.get(turn.group)
        if record is None and turn.group in self.adopted:
            self._early.setdefault(turn.group, []).append(turn)
        elif record is None:
            return  # its group was released while its last turns were on their way; its verdict matters to nobody
        elif (turn.index, turn.response.turn) not in record.answered:
            assert self._tasks is not None, "turns come while the runner runs"
            record.answered.add((turn.index, turn.response.turn))
            record.last_turn_at = time.monotonic()
            self._tasks.create_task(self._answer(turn, record.prompt, record.n))

    async def _answer(self, turn: TurnDone, prompt: Prompt, n: int) -> None:
        turn = msgspec.structs.replace(turn, response=up_to_stop(turn.response, self.stop, self.tokenizer))
        sample = to_sample(turn.group, turn.index, turn.response, prompt, self.tokenizer)
        try:
            played = await self._played(sample, turn, prompt)
        except EpisodeFailed as failed:
            self.reward.failures.add(sample.id, Unscored(failed.reason, failed.detail))
            await self.rollouts.reject(sample.id, failed.reason, failed.detail)
            return
        if played.text is not None:
            await self.rollouts.extend(sample.id, turn.response.turn, self.tokenizer.encode_text(played.text))
            return
        finish = Finish.LENGTH.value if played.truncated else sample.finish_reason
        reward = self.judges[prompt.judge] if prompt.judge else self.reward
        sample = replace(sample, turn_rewards=played.turn_rewards, finish_reason=finish)
        verdict = await reward.score(sample, n)
        if isinstance(verdict, Reward) and self.episodes is not None:
            verdict = self._with_episode(verdict, sample.id, played)
        if isinstance(verdict, Unscored):
            await self.rollouts.reject(sample.id, verdict.reason, verdict.detail)
        else:
            await self._pass_on(ScoredTurn(sample, turn.response.turn, reward=verdict), turn.purpose)

    def _with_episode(self, verdict: Reward, sample: str, played: Played) -> Verdict:
        """With the environment's numbers beside the reward's own, which are known to be carried by themselves."""
        paid = turn_reward_metrics(played.turn_rewards) if self.keeps_turn_rewards else {}
        numbers = verdict.metrics | paid | {TRUNCATED: float(played.truncated)}
        excess = excess_of_metrics(numbers)
        if not excess:
            return replace(verdict, metrics=numbers)
        detail = f"the numbers beside `reward` with those of the environment {excess}"
        unscored = Unscored(DiscardReason.REWARD_INVALID, detail)
        self.reward.failures.add(sample, unscored)
        return unscored

    async def _pass_on(self, scored: ScoredTurn, purpose: Purpose) -> None:
        """The score, or with a custom group filter the whole group's scores once they are there."""
        record = self._groups.get(scored.sample.group)
        if record is not None:
            record.rewards[split_sample_id(scored.sample.id)[1]] = scored.reward.value
        group_filter = self.group_filter if purpose is Purpose.TRAIN else None
        passed = [scored] if group_filter is None else await group_filter.admit(scored)
        if isinstance(passed, Unscored):
            if passed.reason is not DiscardReason.FILTERED:
                self.reward.failures.add(scored.sample.id, passed)
            await self.rollouts.reject(scored.sample.id, passed.reason, passed.detail)
            return
        for one in passed:
            await self.rollouts.score(one.sample.id, one.turn, one.reward.value, one.reward.metrics)

    async def _played(self, sample: Sample, turn: TurnDone, prompt: Prompt) -> Played:
        """Over: there is no environment, it has nothing to say, or the budget is used up."""
        if self.episodes is None:
            return Played(None)

        def past() -> Iterator[PastTurn]:
            return past_turns(turn.group, turn.index, turn.response, prompt, self.tokenizer)

        is_over = turn.response.finish is Finish.LENGTH
        return await self.episodes.play(sample, turn.response.turn, past, is_over=is_over)
