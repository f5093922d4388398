"""A sample that waits for the trainer's own engines, none of which has room, beside another engine that has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from polyrl.ledger import speed
from polyrl.ledger.scheduling.cost import Costs
from polyrl.ledger.state import LeasedEngine, LedgerState
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.wire import Submit, WeightsLoaded, pack_ids
from polyrl_rollout.testing.stage import Stage

SLOTS: Final = 4
STEP_S: Final = 0.02
TOKENS: Final = 100
"""That each sample may have, and is expected to."""


LONG: Final = 2000
"""Tokens of a prompt that takes as long to read as forty take to make."""


def full_at_home(times: float, waiting: int = 1, slots: int = SLOTS, prompt: int = LONG) -> Stage:
    """The trainer's own engine runs as many as it may and has read them; the other one, whose steps take so many
    times longer, has come since; `waiting` samples wait as if they had just come."""
    stage = Stage()
    stage.engine("own", Pool.RESERVED, max_running=slots, kv_tokens=10_000_000)
    stage.submit(slots + waiting, prompt_ids=pack_ids([9] * prompt))
    while len(stage.placed()["own"]) < slots:
        stage.pass_time(0.0)
    stage.engine("other", version=-1, max_running=16)
    for name, step_s in (("own", STEP_S), ("other", times * STEP_S)):
        stage.ledger.state.engines[name].step_scale = step_s
        stage.ledger.state.engines[name].token_at = stage.now
    stage.ledger.state.engines["own"].unread = 0
    return stage


def placed_there(stage: Stage) -> int:
    stage.agent("other", WeightsLoaded(0, 0.1, load_seconds=0.1, bytes_pulled=100))
    return len(stage.placed()["other"])


@pytest.mark.parametrize(
    ("times", "waiting", "prompt", "placed"),
    [
        pytest.param(10.0, 1, LONG, 0, id="ten times slower"),
        pytest.param(1.0, 1, LONG, 1, id="as fast"),
        pytest.param(0.5, 1, LONG, 1, id="faster"),
        pytest.param(1.1, 1, LONG, 1, id="slower by less than its turn takes"),
        pytest.param(10.0, 1, 10, 1, id="what is made there meanwhile is worth more than reading it again"),
        pytest.param(10.0, SLOTS, LONG, 0, id="ten times slower, each in its turn"),
        pytest.param(10.0, 60, LONG, 1, id="a queue of fifteen rounds: until there is as much to read there"),
    ],
)
def test_it_waits_if_its_turn_at_home_ends_sooner(times: float, waiting: int, prompt: int, placed: int) -> None:
    assert placed_there(full_at_home(times, waiting, prompt=prompt)) == placed


def test_the_first_of_a_queue_wait_and_those_go_whose_turn_is_late() -> None:
    stage = full_at_home(10.0, 60, prompt=500)
    assert placed_there(stage) > SLOTS
    there = [int(sample.partition(".")[0]) for sample in stage.placed()["other"]]
    waiting = [number for number, entry in stage.ledger.state.groups.items() if entry.waiting]
    assert min(waiting) == SLOTS
    assert len([number for number in waiting if number < min(there)]) > 2 * SLOTS


def test_who_is_behind_more_than_one_look_reads_goes_elsewhere_as_well() -> None:
    """Some 350 are better off waiting, which is more than are asked for in one look at the queue."""
    stage = full_at_home(15.0, 2000, slots=512, prompt=1500)
    assert placed_there(stage) > 0
    there = [int(sample.partition(".")[0]) for sample in stage.placed()["other"]]
    assert 256 < min(there) - 512 < 512


def test_a_shorter_prompt_is_not_passed_by_with_those_that_wait() -> None:
    """What is before it in the queue finds no room at home, and this does."""
    stage, prompts = Stage(), [200, 10, 200]
    stage.engine("own", Pool.RESERVED, max_running=64, kv_tokens=3 * (TOKENS + 10) + 10)
    stage.submit(2)
    stage.engine("other", max_running=16)
    for name, step_s in (("own", STEP_S), ("other", 10 * STEP_S)):
        stage.ledger.state.engines[name].step_scale = step_s
        stage.ledger.state.engines[name].token_at = stage.now
    sampling = SamplingParams(TOKENS)
    groups = [
        Group(2 + number, 0, Purpose.TRAIN, pack_ids([9] * long), 1, sampling, 0, 0)
        for number, long in enumerate(prompts)
    ]
    stage.trainer(Submit(stage.request(), tuple(groups)))
    assert stage.placed() == {"own": ["0.0", "1.0", "3.0"], "other": []}


def test_what_one_of_them_refused_leaves_its_room_to_those_behind() -> None:
    stage = full_at_home(10.0, SLOTS)
    stage.engine("roomy", Pool.RESERVED, version=-1, max_running=1)
    first = stage.ledger.state.samples[f"{SLOTS}.0"]
    first.rejected_by.append("roomy")
    first.attempt, first.moved_at = 1, stage.now
    stage.ledger.state.engines["roomy"].step_scale = STEP_S
    assert placed_there(stage) == 0
    stage.agent("roomy", WeightsLoaded(0, 0.1, load_seconds=0.1, bytes_pulled=100))
    assert stage.placed()["roomy"] == [f"{SLOTS + 1}.0"]


def test_the_trainers_own_are_read_once_and_not_for_each_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five hundred of them, read for each of a long queue at each end of a turn, took three seconds."""
    own, read = 40, list[str]()
    stage = Stage()
    for number in range(own):
        stage.engine(f"own{number}", Pool.RESERVED, max_running=SLOTS)
    stage.submit(own * SLOTS // 8 + 64, n=8, prompt_ids=pack_ids([9] * LONG))
    stage.engine("other", version=-1, max_running=16)
    for engine in stage.ledger.state.engines.values():
        engine.step_scale, engine.token_at = STEP_S if engine.pool is Pool.RESERVED else 10 * STEP_S, stage.now
    step = Costs.step

    def counted(costs: Costs, engine: LeasedEngine, more: int = 0) -> float:
        read.append(engine.name)
        return step(costs, engine, more)

    monkeypatch.setattr(Costs, "step", counted)
    assert placed_there(stage) == 0
    assert own <= len(read) < 3 * own


@pytest.mark.parametrize(
    "unable",
    [
        pytest.param(lambda state: setattr(state.engines["own"], "draining", "it ends"), id="it drains"),
        pytest.param(lambda state: setattr(state.engines["own"], "failures", 1), id="it has failed"),
        pytest.param(lambda state: setattr(state.engines["own"], "quarantined_until", 1e9), id="it pauses"),
        pytest.param(lambda state: setattr(state.engines["own"], "pool", Pool.SPOT), id="it is not the trainer's"),
        pytest.param(lambda state: state.samples[last(state)].rejected_by.append("own"), id="it refused the sample"),
        pytest.param(lambda state: setattr(state.engines["own"], "capacity", short(state)), id="its context is short"),
    ],
)
def test_it_does_not_wait_for_one_that_will_not_take_it(unable: Callable[[LedgerState], None]) -> None:
    stage = full_at_home(10.0)
    unable(stage.ledger.state)
    assert placed_there(stage) == 1


def last(state: LedgerState) -> str:
    return next(name for name, sample in state.samples.items() if not sample.attempt)


def short(state: LedgerState) -> object:
    return msgspec.structs.replace(state.engines["own"].capacity, max_context=1)


def test_it_waits_no_longer_than_it_could_gain() -> None:
    """What runs at home may take far longer than was thought."""
    stage = full_at_home(10.0)
    assert placed_there(stage) == 0
    there, waited = 10 * STEP_S * (TOKENS + 2 * LONG / speed.PREFILL_RATIO), 0.0
    while not stage.placed()["other"] and waited < 2 * there:
        stage.pass_time_heard(1.0)
        waited += 1.0
    assert 0.5 * there < waited < there


def test_it_waits_for_room_for_what_it_holds_as_for_a_slot() -> None:
    stage = Stage()
    stage.engine("own", Pool.RESERVED, max_running=64, kv_tokens=SLOTS * (LONG + TOKENS + 1))
    stage.submit(2 * SLOTS, prompt_ids=pack_ids([9] * LONG))
    own, running = stage.ledger.state.engines["own"], len(stage.placed()["own"])
    assert running < 2 * SLOTS
    stage.engine("other", version=-1, max_running=16)
    own.step_scale, own.token_at = STEP_S, stage.now
    other = stage.ledger.state.engines["other"]
    other.step_scale, other.token_at = 10 * STEP_S, stage.now
    assert placed_there(stage) == 0
