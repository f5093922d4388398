"""Keeps a step supplied with groups: numbers them, submits them, and replaces those of which nothing will be trained.

    rl_loop / evaluation ──open──> StepGroups ──Submit──> manager
                                       ^───GroupDropped──────┘   (a replacement, a count, or the end of the run)

A step is never silently short: each dropped group that the step needs is replaced by another prompt, and when too
many are, the run fails with the counts by reason and the first message of each. Groups that a filter refused are no
failures and have a bound of their own. What was dropped because the manager
lost its journal, or because an environment did not repeat itself after a restart or the end of its worker, is submitted
again with the same prompt; that is no fault of the prompt and counts as no replacement. A restart does it once to a
group at most, and a worker ends through the fault of another sample, which is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from polyrl.errors import ProtocolError, RunFailed
from polyrl.sample import DiscardReason, Group, Purpose, SamplingParams, group_digest, sample_id
from polyrl.wire import GroupDropped, HeldGroup, pack_ids
from polyrl_trainer.data.buffer import DrawnItem
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.session import Session

_RESUBMITTED: Final = (DiscardReason.JOURNAL_LOST, DiscardReason.ENVIRONMENT_DIVERGED)
"""Reasons that an end of another process brings, of which a group that is submitted now has none."""

Replace = Callable[[GroupDropped, DrawnItem[Prompt]], DrawnItem[Prompt] | None]
"""Another prompt for a dropped group, or None when the step can do without."""


@dataclass(frozen=True)
class GroupPlan:
    """What all groups of a step have in common."""

    step: int
    purpose: Purpose
    samples_per_group: int
    sampling: SamplingParams
    min_version: int
    max_version: int
    max_replaced: int
    """Most replacements of what was lost or could not be scored."""
    max_filtered: int = 0
    """Most replacements of what did not pass the filter."""


@dataclass(eq=False)
class StepGroups:
    """The groups of one step: live ones await training, used ones were taken, dropped ones are counted."""

    plan: GroupPlan
    replace: Replace
    supply: GroupSupply
    live: dict[int, DrawnItem[Prompt]] = field(default_factory=dict)
    used: dict[int, DrawnItem[Prompt]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    first_detail: dict[str, str] = field(default_factory=dict)
    replaced: int = 0
    filtered: int = 0
    submitted: int = 0
    """Prompts, replacements among them."""
    filtered_rewards: list[list[float]] = field(default_factory=list)
    """Rewards of each filtered group where they are known."""
    heir: StepGroups | None = None
    """For what an earlier step left over: the step that trains it, which gets the replacements."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, draws: Sequence[DrawnItem[Prompt]]) -> None:
        """Registers the prompts with the runner of user code, then submits them."""
        numbered = {self.supply.number_for(self._group(0, draw.item)): draw for draw in draws}
        self.live.update(numbered)
        self.submitted += len(numbered)
        await self.supply.submit({self._group(number, draw.item): draw.item for number, draw in numbered.items()})
        self._changed.set()

    def prompt_of(self, group: int) -> Prompt:
        """Raises ProtocolError for a group that this step does not wait for: trained already, dropped, or foreign."""
        if group not in self.live:
            raise ProtocolError(f"group {group} was delivered to step {self.plan.step}, which does not wait for it")
        return self.live[group].item

    def use(self, groups: Sequence[int]) -> None:
        """These groups are trained (or measured): they will not be delivered again."""
        for group in groups:
            self.used[group] = self.live.pop(group)

    def give_back(self, groups: Sequence[int]) -> None:
        """These were taken, and nothing was learned of them."""
        self.live |= {group: self.used.pop(group) for group in groups if group in self.used}

    def scored(self) -> int:
        """Live groups of which every sample has its reward: they are complete, unless a filter takes them away."""
        rewards_of, n = self.supply.runner.rewards_of, self.plan.samples_per_group
        return sum(len(rewards_of(group)) == n for group in self.live)

    async def change(self, timeout_s: float) -> bool:
        """Waits until a group was submitted or dropped since the last call; False when the time is up."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def drop(self, dropped: GroupDropped) -> None:
        """Counts, and replaces if the step needs it. Raises RunFailed above the limit of replacements."""
        draw = self.live.pop(dropped.group, None)
        if draw is None:
            return
        self.dropped[dropped.reason.value] += 1
        self.supply.dropped[dropped.reason.value] += self.plan.purpose is Purpose.TRAIN
        self.first_detail.setdefault(dropped.reason.value, dropped.detail)
        if dropped.reason is DiscardReason.FILTERED:
            rewards = self.supply.runner.rewards_of(dropped.group)
            self.filtered_rewards += [rewards] * (len(rewards) == self.plan.samples_per_group)
        self.supply.runner.release([dropped.group])
        if dropped.reason in _RESUBMITTED:
            self.submitted -= 1
            await self.submit([draw])
            return
        replacement = self.replace(dropped, draw)
        if replacement is not None:
            step = self.heir or self
            step._count_replacement(filtered=dropped.reason is DiscardReason.FILTERED)
            await step.submit([replacement])
        self._changed.set()

    def _count_replacement(self, *, filtered: bool) -> None:
        self.filtered += filtered
        self.replaced += not filtered
        if self.filtered > self.plan.max_filtered:
            raise RunFailed(
                f"step {self.plan.step}: more than {self.plan.max_filtered} prompts had to be replaced because their"
                " groups did not pass recipe.algorithm.groupFilter: the data is too easy or too hard for this policy"
                f" (maxFilteredGroupsPerStep): {self.reasons()}"
            )
        if self.replaced > self.plan.max_replaced:
            raise RunFailed(
                f"step {self.plan.step}: more than {self.plan.max_replaced} prompts had to be replaced because their "
                f"groups were discarded: {self.reasons()}"
            )

    def reasons(self) -> str:
        """Counts and first messages, for people."""
        return "; ".join(f"{reason} {n} (first: {self.first_detail[reason]})" for reason, n in self.dropped.items())

    def _group(self, number: int, prompt: Prompt) -> Group:
        plan = self.plan
        return Group(
            id=number,
            step=plan.step,
            purpose=plan.purpose,
            prompt_ids=pack_ids(prompt.ids),
            n=plan.samples_per_group,
            sampling=plan.sampling,
            min_version=plan.min_version,
            max_version=plan.max_version,
        )


class AdoptedGroups:
    """What an earlier trainer of this run left at the manager: groups that are generated, or even scored, not trained.

    A trainer that goes on from a checkpoint submits the prompts of its next step again. Those that the manager still
    holds for the same step, prompt, sampling and weight versions need not be generated twice: each is taken once. So is
    one with all its verdicts whose version, under whatever number, had the very weights that training goes on with:
    what was trained after the checkpoint is trained again, to the same weights where the learner repeats itself to the
    bit. All others are too old, or too new.
    """

    def __init__(self, held: Iterable[HeldGroup] = (), *, whole_groups: bool = False) -> None:
        """`whole_groups`: verdicts leave by whole groups, so one with some of them is of no use."""
        self._useful: dict[int, HeldGroup] = {}
        self._useless: dict[int, HeldGroup] = {}
        for group in held:
            half = whole_groups and group.scored and not group.complete
            (self._useless if half else self._useful)[group.id] = group
        self.taken: set[int] = set()
        """Their generation began before this trainer did."""
        self._replayed_step = -1
        """The newest training step that took a group by its weights."""

    def __contains__(self, number: object) -> bool:
        return number in self._useful

    def take(self, group: Group, content: bytes = b"") -> int | None:
        """The number of a held group with the prompt, sampling and allowed versions of `group`, or the weights
        `content`; None without."""
        digest, low, high = group_digest(group), group.min_version, group.max_version
        for number, one in self._useful.items():
            same_weights = one.complete and content and one.content == content
            if one.digest == digest and (same_weights or low <= one.min_version <= one.max_version <= high):
                del self._useful[number]
                self.taken.add(number)
                if same_weights and group.purpose is Purpose.TRAIN:
                    self._replayed_step = group.step
                return number
        return None

    def holds_replay_of(self, step: int) -> bool:
        """Whether whole groups of this training step wait for weights that an earlier trainer had published: for the
        step to be trained again, to the same weights."""
        held = self._useful.values()
        return any((one.step, one.purpose) == (step, Purpose.TRAIN) and one.complete and one.content for one in held)

    @property
    def want_weights(self) -> bool:
        """Whether some can be taken only by who knows what the weights are."""
        return any(one.complete and one.content for one in self._useful.values())

    def forget(self, number: int) -> None:
        """The manager has dropped it."""
        self._useful.pop(number, None)
        self._useless.pop(number, None)

    def give_up(self, step: int, purpose: Purpose) -> list[int]:
        """Gives up what is of no use once this step was submitted: what is left of the step, and with a training step
        all that is left, since training goes on with other weights. But where the step took what was trained before,
        complete groups of later steps wait for the same."""
        left = self._useless | self._useful
        if purpose is Purpose.TRAIN and step == self._replayed_step:
            left = {number: one for number, one in left.items() if one.step <= step or not one.complete}
        elif purpose is not Purpose.TRAIN:
            left = {number: one for number, one in left.items() if (one.step, one.purpose) == (step, purpose)}
        for number in left:
            self.forget(number)
        return list(left)


@dataclass(eq=False)
class GroupSupply:
    """Hands out group numbers, and brings each dropped group to the step that waits for it."""

    rollouts: Rollouts
    runner: UserCodeRunner
    session: Session
    adopted: AdoptedGroups = field(default_factory=AdoptedGroups)
    """What a trainer that goes on from a checkpoint may take instead of having it generated."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups of all training steps, by reason, that no state has counted."""
    _open: dict[tuple[Purpose, int], StepGroups] = field(default_factory=dict)

    def open(self, plan: GroupPlan, replace: Replace) -> StepGroups:
        """A step begins."""
        groups = StepGroups(plan, replace, supply=self)
        self._open[plan.purpose, plan.step] = groups
        return groups

    async def close(self, groups: StepGroups) -> list[DrawnItem[Prompt]]:
        """The step has all it needs: the rest is cancelled as surplus, and its prompts are given back, oldest first."""
        self._open.pop((groups.plan.purpose, groups.plan.step), None)
        await self.session.answered(self.rollouts.end_step(groups.plan.step, groups.plan.purpose))
        surplus = [groups.live[number] for number in sorted(groups.live)]
        self.runner.release([*groups.used, *groups.live])
        return surplus

    def carry(self, groups: StepGroups) -> StepGroups:
        """The step is over, and the next one trains what is left of its groups, which are counted there anew."""
        rest = self.open(groups.plan, groups.replace)
        rest.live, rest.submitted = groups.live, len(groups.live)
        self.runner.release(groups.used)
        return rest

    async def run(self) -> None:
        """Consumes drops for as long as the run lives; raises what ends the run."""
        async for dropped in self.rollouts.dropped():
            self.adopted.forget(dropped.group)
            groups = self._open.get((dropped.purpose, dropped.step))
            if groups is not None:
                await groups.drop(dropped)

    def number_for(self, group: Group) -> int:
        """The number of an adopted group that equals `group`, else one that this run has not used."""
        adopted = self.adopted.take(group, self.session.weights_content)
        if adopted is not None:
            return adopted
        self.session.state.next_group += 1
        return self.session.state.next_group - 1

    async def give_up_adopted(self, plan: GroupPlan) -> None:
        """Rejects the adopted groups that nobody has taken once this step was submitted: they are of other steps or
        other weights."""
        left = self.adopted.give_up(plan.step, plan.purpose)
        self.runner.release(left)
        text = f"its trainer ended; the next one goes on with step {plan.step} and weight version {plan.max_version}"
        rejected = (self.rollouts.reject(sample_id(n, 0), DiscardReason.STALE, text) for n in left)
        await self.session.answered(*rejected)

    async def submit(self, groups: Mapping[Group, Prompt]) -> None:
        """Registers with the runner of user code first: a turn may be back before `submit` returns."""
        for group, prompt in groups.items():
            self.runner.register(group.id, prompt, group.n)
        await self.session.answered(self.rollouts.submit(list(groups)))
