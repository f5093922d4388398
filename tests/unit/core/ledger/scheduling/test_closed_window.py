"""While the trainer learns, its own engines idle: they are in nobody's way, and what one event looks at is bounded."""

from __future__ import annotations

import pytest

from polyrl.ledger.events import EngineServing
from polyrl.ledger.fleet import Fleet
from polyrl.ledger.scheduling import cost, placement
from polyrl.ledger.scheduling.cost import Costs, others_can, placement_request
from polyrl.ledger.scheduling.placement import ASKED, ASKS_AT_ONCE, CANDIDATES
from polyrl.ledger.scheduling.rebalance import TAKERS
from polyrl.ledger.state import SamplePhase
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool
from polyrl.wire import Assign, Deregister, Recall
from polyrl_rollout.testing.stage import Stage, sent

STEP_S = 0.02


def learning(own: int, others: int, *, slots: int = 8) -> Stage:
    """So many idle engines of the trainer, which learns for five seconds as far as anybody knows; others idle too."""
    stage = Stage()
    for index in range(own):
        stage.engine(f"r{index}", Pool.RESERVED, max_running=slots)
    for index in range(others):
        stage.engine(f"s{index}", max_running=slots)
    stage.submit(1)
    stage.finish_all()
    stage.ask(most=1)
    assert not stage.ledger.state.window_open
    for engine in stage.ledger.state.engines.values():
        engine.step_scale = STEP_S
    return stage


def test_many_idle_engines_of_the_trainer_hide_no_taker() -> None:
    stage = learning(2 * TAKERS, others=1)
    for index in range(2 * TAKERS):
        stage.ledger.state.engines[f"r{index}"].step_scale = STEP_S / 4
    stage.submit(4)
    stage.ledger.state.engines["s0"].step_scale = 1.0
    stage.pass_time(2.0)
    assert len(stage.ledger.state.engines["s0"].running) == 4
    assert sent(stage.engine("fast"), Recall)


def test_of_a_large_fleet_the_fastest_others_are_asked_and_none_of_the_trainers() -> None:
    stage = learning(ASKED, others=ASKED)
    for index in range(ASKED):
        stage.ledger.state.engines[f"r{index}"].step_scale = STEP_S / 2
    stage.ledger.state.engines["s7"].step_scale = STEP_S / 1.5
    fleet = Fleet(stage.ledger.state)
    asked = [engine.name for engine in fleet.asked(ASKED, with_own=False)]
    assert asked[0] == "s7"
    assert all(name.startswith("s") for name in asked)
    assert next(fleet.asked(ASKED, with_own=True)).name.startswith("r")
    assert [engine.name for engine in fleet.roomy()][: ASKED + 1][-1] == "s7"
    assert fleet.roomy_engines == 2 * ASKED
    (assign,) = [engine for engine, _ in stage.submit(1).to_agents]
    assert assign == "s7"


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "nothing is measured"])
@pytest.mark.parametrize("budget", [10, 100, 1000])
def test_the_bound_of_what_a_reserved_engine_costs_is_one(*, measured: bool, budget: int) -> None:
    stage = learning(4, others=2)
    for index, engine in enumerate(stage.ledger.state.engines.values()):
        engine.step_scale = STEP_S * (1 + index) if measured else 0.0
    stage.submit(1, max_new_tokens=budget)
    state = stage.ledger.state
    transition = Transition(state, stage.now, Fleet(state))
    costs, request = Costs(transition), placement_request(state, list(state.samples)[-1], stage.now)
    own = [costs.on(one, request, has_sibling=True) for one in transition.fleet.reserved()]
    assert 5.0 + budget * STEP_S / 4 < costs.in_window_at_least(request) <= min(own)


def test_without_engines_of_the_trainer_nobody_waits_for_the_window() -> None:
    stage = learning(0, others=1)
    stage.submit(1)
    state = stage.ledger.state
    transition = Transition(state, stage.now, Fleet(state))
    request = placement_request(state, list(state.samples)[-1], stage.now)
    assert Costs(transition).in_window_at_least(request) == float("inf")


@pytest.mark.parametrize("refused", [False, True], ids=["nobody refused it", "that engine refused it"])
def test_a_sample_waits_for_the_window_only_where_it_will_be_taken(*, refused: bool) -> None:
    """Seed 3010951: it waited in vain until the trainer had learned, beside an idle engine."""
    stage = learning(1, others=1)
    stage.ledger.state.engines["s0"].step_scale = 1.0
    stage.submit(1, max_new_tokens=35)
    (waiting,) = [one for one in stage.ledger.state.samples.values() if one.phase is SamplePhase.WAITING]
    if refused:
        waiting.rejected_by, waiting.rejections = ["r0"], 1
    stage.pass_time(1.5)
    assert (waiting.phase is SamplePhase.ASSIGNED) is refused


def test_who_took_work_last_is_believed_only_while_it_does() -> None:
    stage = learning(1, others=2)
    state = stage.ledger.state
    transition = Transition(state, stage.now, Fleet(state))
    assert others_can(transition, 0, 0)
    for _ in range(2):
        state.engines[transition.fleet.last_other].quarantined_until = stage.now + 1.0
        left = [name for name in ("s0", "s1") if state.engines[name].quarantined_until <= stage.now]
        assert others_can(transition, 0, 0) is bool(left)
    assert not others_can(transition, 1, 1), "of another version"


def test_that_nobody_else_takes_work_is_read_once_until_that_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each engine that was asked for a sample all of a fleet was read that pauses, or has other weights: a million
    calls for 64 samples beside 1,600 engines."""
    stage, read = learning(1, others=3), list[str]()
    fleet, serves = Fleet(stage.ledger.state), cost.serves
    monkeypatch.setattr(cost, "serves", lambda engine, *versions: read.append(engine.name) or serves(engine, *versions))

    def can(version: int) -> bool:
        return others_can(Transition(stage.ledger.state, stage.now, fleet), version, version)

    assert [can(1) for _ in range(8)] == [False] * 8
    assert read == ["s0", "s1", "s2"]
    for index in range(3):
        stage.ledger.state.engines[f"s{index}"].quarantined_until = stage.now + 2.0 + index
    assert not can(0)
    stage.now += 1.9
    assert not can(0)
    assert len(read) == 6
    stage.now += 0.2
    assert can(0), "the first pause is over"
    Transition(stage.ledger.state, stage.now, fleet).record(EngineServing("s1", 1, at=stage.now))
    assert can(1) is False
    stage.now += 1.0
    assert can(1), "it has loaded that"


def test_what_nobody_refused_is_no_look_at_a_fleet_that_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each length of a prompt that waits, all engines were asked whether they pause: 755,000 calls in a tick."""
    stage = Stage()
    for index in range(4):
        stage.engine(f"s{index}")
        stage.ledger.state.engines[f"s{index}"].quarantined_until = stage.now + 60.0
    stage.submit(1)
    asked, has_slot = list[str](), placement.has_slot
    monkeypatch.setattr(placement, "has_slot", lambda engine, now: asked.append(engine.name) or has_slot(engine, now))
    state = stage.ledger.state
    room = placement.Room(Transition(state, stage.now, Fleet(state)))
    assert room.holds(state.groups[0].group)
    assert asked == []
    state.samples["0.0"].rejected_by, state.samples["0.0"].rejections = ["s0"], 1
    state.samples["0.0"].moved_at = stage.now
    assert not room.holds(state.groups[0].group), "all others pause, and that one is not asked again at once"


def test_turns_of_differing_lengths_leave_time_for_others_and_all_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a lost machine leaves them; what is given at once to siblings of one length is bounded by itself."""
    stage = Stage()
    stage.engine("a", max_running=64)
    stage.submit(40)
    for number in tuple(stage.ledger.state.assignments):
        stage.tokens("a", number, [5] * number)
    monkeypatch.setattr(placement, "ASKS_AT_ONCE", 5)
    stage.agent("a", Deregister("leaving"))
    placed = [len(sent(stage.engine("b", max_running=64), Assign))]
    while placed[-1]:
        placed.append(len(sent(stage.pass_time(0.0), Assign)))
    assert sum(placed) == 40
    assert max(placed) <= 5 + CANDIDATES
    assert ASKS_AT_ONCE > CANDIDATES
