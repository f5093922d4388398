"""What a trainer does that has started again, and one whose manager lost its journal: held groups, cursor, versions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from polyrl.sample import DiscardReason, Finish, Group, Purpose, Response, SamplingParams, Scored, group_digest
from polyrl.weights import WeightsRef
from polyrl.wire import Batch, GroupDropped, HeldGroup, PublishVersion, TrainerWelcome, TurnDone
from polyrl_trainer.backends.weight_stream import write_stream
from polyrl_trainer.client.conversation import Cursor
from polyrl_trainer.data.buffer import DrawnItem
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.generation.supply import AdoptedGroups, GroupPlan, GroupSupply, StepGroups
from polyrl_trainer.testing.memory_publisher import MemoryPublisher
from polyrl_trainer.user_code.verdicts import Reward
from polyrl_trainer.weights.policy_versions import PolicyVersions

SAMPLING = SamplingParams(8)
DEADLINE_S = 60.0


def group(number: int, token: int = 5, versions: tuple[int, int] = (3, 3), **fields: Any) -> Group:
    default: dict[str, Any] = {"step": 4, "purpose": Purpose.TRAIN, "n": 2} | fields
    ids = np.array([token], "<u4").tobytes()
    low, high = versions
    return Group(id=number, prompt_ids=ids, sampling=SAMPLING, min_version=low, max_version=high, **default)


def held(number: int, token: int = 5, versions: tuple[int, int] = (3, 3), scored: int = 0, turn: int = 0) -> HeldGroup:
    return HeldGroup(number, 4, Purpose.TRAIN, group_digest(group(number, token)), *versions, scored, turn)


def measured(number: int, token: int, version: int, step: int = 2) -> HeldGroup:
    """A held group of an evaluation."""
    digest = group_digest(group(number, token, step=step, purpose=Purpose.EVAL))
    return HeldGroup(
        number, step, purpose=Purpose.EVAL, digest=digest, min_version=version, max_version=version, scored=0, turn=0
    )


# --- adopted groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (group(99), 7),
        (group(99, versions=(2, 3)), 7),
        (group(99, versions=(4, 4)), None),
        (group(99, versions=(2, 2)), None),
        (group(99, token=6), None),
        (group(99, step=5), None),
        (group(99, n=3), None),
        (group(99, purpose=Purpose.EVAL), None),
    ],
    ids=[
        "same",
        "older version allowed",
        "newer version needed",
        "version too new",
        "other prompt",
        "other step",
        "other size",
        "evaluation",
    ],
)
def test_only_the_very_same_group_of_allowed_versions_is_taken(wanted: Group, expected: int | None) -> None:
    groups = AdoptedGroups([held(7)])
    assert groups.take(wanted) == expected
    assert groups.give_up(4, Purpose.TRAIN) == ([] if expected else [7])


def test_each_is_taken_once_and_two_of_the_same_prompt_one_after_the_other() -> None:
    groups = AdoptedGroups([held(7), held(8), held(9, token=6)])
    groups.forget(9)
    assert [groups.take(group(99)) for _ in range(3)] == [7, 8, None]
    assert groups.give_up(4, Purpose.TRAIN) == []


def test_half_of_the_verdicts_is_of_no_use_to_a_group_filter_and_later_turns_are_taken() -> None:
    left = [held(7, scored=1), held(8, turn=1)]
    assert [AdoptedGroups(left).take(group(99)) for _ in range(1)] == [7]
    strict = AdoptedGroups(left, whole_groups=True)
    assert (strict.take(group(99)), strict.take(group(99))) == (8, None)
    assert strict.give_up(4, Purpose.TRAIN) == [7]


# --- supply and runner ------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """A rollout side that records its calls."""

    submitted: list[Group] = field(default_factory=list)
    rejected: list[tuple[str, DiscardReason]] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    queue: asyncio.Queue[TurnDone] = field(default_factory=asyncio.Queue)

    async def submit(self, groups: list[Group]) -> None:
        self.submitted += groups

    async def reject(self, sample: str, reason: DiscardReason, detail: str) -> None:
        self.rejected.append((sample, reason))

    async def score(self, sample: str, turn: int, reward: float, metrics: dict[str, float]) -> None:
        self.scored.append(sample)

    async def publish(self, weights: WeightsRef) -> None:
        self.published.append(weights.version)

    async def turns(self) -> Any:
        while True:
            yield await self.queue.get()


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return ""


class OneForAll:
    async def score(self, sample: Any, n: int) -> Reward:
        return Reward(1.0)

    def forget(self, group: int) -> None:
        pass


@dataclass
class State:
    next_group: int = 20
    version: int = 3
    oldest_version: int = 0
    weights_changed: bool = True


@dataclass
class Session:
    state: State = field(default_factory=State)
    weights_content: bytes = b""

    async def answered(self, *requests: Awaitable[None]) -> None:
        await asyncio.gather(*requests)


def draw(token: int) -> DrawnItem[Prompt]:
    return DrawnItem(0, token, item=Prompt("", "", ids=(token,), metadata={}))


def step_of(supply: GroupSupply, **fields: Any) -> StepGroups:
    default: dict[str, Any] = {"step": 4, "purpose": Purpose.TRAIN, "samples_per_group": 2, "sampling": SAMPLING}
    default |= {"min_version": 3, "max_version": 3, "max_replaced": 0}
    return supply.open(GroupPlan(**(default | fields)), lambda dropped, draw: None)


def turn_of(number: int, index: int = 0) -> TurnDone:
    one = np.array([1], "<u4").tobytes()
    response = Response(
        f"{number}.{index}", one, logprobs=bytes(4), loss_mask=b"\1", spans=(), turn=0, finish=Finish.STOP
    )
    return TurnDone(number, index, purpose=Purpose.TRAIN, step=4, response=response)


def site(*groups: HeldGroup) -> tuple[Recorder, UserCodeRunner, GroupSupply]:
    calls, left = Recorder(), AdoptedGroups(groups)
    host = UserCodeRunner(calls, Tokenizer(), reward=OneForAll(), adopted=left)  # type: ignore[arg-type]
    return calls, host, GroupSupply(calls, host, session=Session(), adopted=left)  # type: ignore[arg-type]


async def test_adopted_groups_take_the_place_of_new_ones_and_the_rest_is_stale() -> None:
    calls, _, supply = site(held(7, token=1), held(8, token=2), held(9, token=1, versions=(5, 5)))
    groups = step_of(supply)
    await groups.submit([draw(1), draw(3), draw(2)])
    assert list(groups.live) == [7, 20, 8]
    assert [one.id for one in calls.submitted] == [7, 20, 8]
    await supply.give_up_adopted(groups.plan)
    assert calls.rejected == [("9.0", DiscardReason.STALE)]
    await groups.submit([draw(1)])
    await supply.give_up_adopted(groups.plan)
    assert list(groups.live)[-1] == 21
    assert len(calls.rejected) == 1


async def test_an_evaluation_leaves_what_is_held_for_the_step_that_follows() -> None:
    calls, _, supply = site(held(7, token=1), measured(8, 1, version=3), measured(9, 1, version=2))
    evaluation = step_of(supply, step=2, purpose=Purpose.EVAL)
    await evaluation.submit([draw(1)])
    await supply.give_up_adopted(evaluation.plan)
    assert list(evaluation.live) == [8]
    assert calls.rejected == [("9.0", DiscardReason.STALE)]
    groups = step_of(supply)
    await groups.submit([draw(1)])
    assert list(groups.live) == [7]


@pytest.mark.parametrize("reason", [DiscardReason.JOURNAL_LOST, DiscardReason.ENVIRONMENT_DIVERGED])
async def test_a_group_lost_by_a_restart_is_submitted_again_however_many_there_are(reason: DiscardReason) -> None:
    calls, _, supply = site()
    groups = step_of(supply)
    await groups.submit([draw(1), draw(2)])
    for number in (20, 21):
        await groups.drop(GroupDropped(number, 4, purpose=Purpose.TRAIN, reason=reason, detail=""))
    assert [one.id for one in calls.submitted] == [20, 21, 22, 23]
    assert [one.item.ids for one in groups.live.values()] == [(1,), (2,)]
    assert groups.dropped == {reason.value: 2}
    assert groups.replaced == 0


async def test_turns_of_adopted_groups_wait_until_somebody_knows_their_prompt() -> None:
    calls, host, supply = site(held(7, token=1), held(9, token=9))
    running = asyncio.create_task(host.run())
    for turn in (turn_of(7), turn_of(9), turn_of(7), turn_of(55)):
        calls.queue.put_nowait(turn)
    async with asyncio.timeout(DEADLINE_S):
        while not calls.queue.empty():  # noqa: ASYNC110 - the runner has no event for it
            await asyncio.sleep(0)
    assert calls.scored == []
    await step_of(supply).submit([draw(1)])
    async with asyncio.timeout(DEADLINE_S):
        while calls.scored != ["7.0"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
    calls.queue.put_nowait(turn_of(7, 1))
    async with asyncio.timeout(DEADLINE_S):
        while calls.scored != ["7.0", "7.1"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# --- weights ----------------------------------------------------------------------------------------------------------


class Publisher(MemoryPublisher):
    """Of weights that never change."""

    def content(self, snapshot: Any) -> bytes:
        return b"these"


class Backend:
    def export_weights(self, room: Any) -> Any:
        return write_stream({}, room)

    def serving_files(self) -> dict[str, bytes]:
        return {}


@pytest.mark.parametrize(
    ("newest", "expected"),
    [((-1, b""), 4), ((4, b"these"), 4), ((4, b"others"), 5), ((9, b"others"), 10)],
    ids=["manager knows none", "same weights", "other weights", "other weights, far ahead"],
)
async def test_a_number_names_one_content_for_ever(newest: tuple[int, bytes], expected: int) -> None:
    calls, session = Recorder(), Session()
    versions = PolicyVersions(Publisher(), calls, session=session, newest=newest)  # type: ignore[arg-type]
    await versions.ensure_published(Backend())  # type: ignore[arg-type]
    session.state.weights_changed = True
    await versions.ensure_published(Backend())  # type: ignore[arg-type]
    assert calls.published == [expected, expected + 1]


# --- the cursor -------------------------------------------------------------------------------------------------------


def welcome(journal: str) -> TrainerWelcome:
    return TrainerWelcome(1, 3.0, beat_s=1.0, journal=journal)


def test_what_is_open_is_lost_with_the_journal_and_nothing_else() -> None:
    cursor = Cursor()
    assert cursor.reconcile(welcome("one")) == ([], [])
    groups = [group(number) for number in (0, 1, 2, 4)]
    cursor.submit(groups)
    cursor.accept(groups)
    cursor.submit([group(5)])  # not accepted yet: it is sent again as it is
    scored = Scored(1, 0, response=turn_of(1).response, reward=1.0, metrics={})
    batch = Batch(1, 6, step=4, samples=(scored,), last=False)
    cursor.see(batch)
    cursor.receive(batch)
    cursor.drop(GroupDropped(2, 4, purpose=Purpose.TRAIN, reason=DiscardReason.REWARD_RAISED, detail=""))
    cursor.submit([other := group(3, step=9)])
    cursor.accept([other])
    cursor.end_step(9, Purpose.TRAIN)
    older, publish = (
        PublishVersion(version, version, endpoint="tcp://a", public_key="k", manifest_hash=b"h") for version in (2, 3)
    )
    cursor.announce(older)
    cursor.announce(publish)
    assert (cursor.next_group, cursor.next_batch) == (5, 7)
    assert cursor.reconcile(welcome("one")) == ([], [])
    lost, again = cursor.reconcile(welcome("two"))
    assert [(drop.group, drop.step, drop.reason) for drop in lost] == [
        (0, 4, DiscardReason.JOURNAL_LOST),
        (4, 4, DiscardReason.JOURNAL_LOST),
    ]
    assert list(again) == [publish]
    assert cursor.reconcile(welcome("two")) == ([], [])


# --- what is trained again --------------------------------------------------------------------------------------------


def scored_with(number: int, token: int, step: int, content: bytes) -> HeldGroup:
    """A complete group that version 3 of those weights generated."""
    digest = group_digest(group(number, token, step=step))
    return HeldGroup(number, step, Purpose.TRAIN, digest, 3, 3, scored=2, turn=0, complete=True, content=content)


async def test_steps_that_are_trained_again_take_what_the_very_same_weights_generated() -> None:
    kept = [scored_with(7, 1, step=4, content=b"four"), scored_with(8, 2, step=5, content=b"five")]
    calls, _, supply = site(*kept, scored_with(9, 3, step=6, content=b"six"))
    for step, token, content in ((4, 1, b"four"), (5, 2, b"five")):
        supply.session.weights_content = content
        groups = step_of(supply, step=step, min_version=30 + step, max_version=30 + step)
        await groups.submit([draw(token)])
        await supply.give_up_adopted(groups.plan)
        assert list(groups.live) == [step + 3], "the number of its version is another one"
    supply.session.weights_content = b"others"
    groups = step_of(supply, step=6, min_version=36, max_version=36)
    await groups.submit([draw(3)])
    await supply.give_up_adopted(groups.plan)
    assert list(groups.live) == [20], "other weights would have written something else"
    assert calls.rejected == [("9.0", DiscardReason.STALE)]


def test_of_other_weights_only_the_finished_is_of_use_and_complete_groups_suit_a_filter() -> None:
    half = scored_with(7, 1, step=4, content=b"four")
    half = msgspec.structs.replace(half, scored=1, complete=False)
    assert AdoptedGroups([half]).take(group(99, 1, versions=(9, 9)), b"four") is None
    whole = scored_with(8, 1, step=4, content=b"four")
    assert AdoptedGroups([whole], whole_groups=True).take(group(99, 1, versions=(9, 9)), b"four") == 8
    assert AdoptedGroups([whole]).take(group(99, 1, versions=(9, 9))) is None
