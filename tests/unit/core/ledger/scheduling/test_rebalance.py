"""Who takes running samples from whom."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec
import pytest

from polyrl.ledger import speed
from polyrl.ledger.events import RecallSent
from polyrl.ledger.fleet import Fleet
from polyrl.ledger.scheduling.placement import place
from polyrl.ledger.scheduling.rebalance import gains, rebalance
from polyrl.ledger.state import LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool
from polyrl.wire import Deregister, Recall, WeightsLoaded, pack_ids
from polyrl_rollout.testing.flow import Flow, Speed
from polyrl_rollout.testing.stage import Stage, sent


@pytest.fixture(autouse=True)
def what_is_measured_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is tried for being unknown."""
    monkeypatch.setattr(speed, "OPTIMISM", 1.0)


@pytest.mark.parametrize(
    ("stay", "go", "moves"),
    [
        pytest.param(10.0, 7.4, True, id="a quarter sooner, and the way there"),
        pytest.param(10.0, 7.46, False, id="not a quarter sooner"),
        pytest.param(1.0, 0.45, False, id="less than half a second sooner"),
        pytest.param(inf, 1e6, True, id="anything before nothing"),
        pytest.param(inf, inf, False, id="nothing for nothing"),
    ],
)
def test_moving_must_pay(stay: float, go: float, moves: bool) -> None:
    assert gains(stay, go, delta_s=0.03) is moves


@pytest.mark.parametrize(
    ("stay", "go", "moves"),
    [
        pytest.param(10.0, 9.63, True, id="three hundredths sooner, and the way there"),
        pytest.param(10.0, 9.65, False, id="as soon"),
        pytest.param(1.0, 0.85, False, id="less than a tenth of a second sooner"),
    ],
)
def test_going_home_must_pay_less(stay: float, go: float, moves: bool) -> None:
    assert gains(stay, go, delta_s=0.03, home=True) is moves


@pytest.mark.parametrize(("home", "lengths"), [(Pool.RESERVED, 1), (Pool.SPOT, 0)], ids=["reserved", "another"])
def test_what_runs_on_a_spot_engine_returns_as_soon_as_a_reserved_one_is_a_little_faster(
    home: Pool, lengths: int
) -> None:
    """A fifth slower is within what a move must promise elsewhere: the last sample of a step stayed there to its end,
    1.28 times as long as the reserved engines, which had all ended, would have needed."""
    stage = Stage()
    stage.engine("spot")
    stage.submit(1)
    stage.ledger.state.engines["spot"].step_scale = 0.05
    stage.pass_time(2.0)
    stage.engine("home", home)
    stage.ledger.state.engines["home"].step_scale = 0.04
    assert len(sent(stage.pass_time(0.5), Recall)) == lengths


def slow_beside_fast(samples: int, **room: int) -> Stage:
    """A slow engine runs them, and a fast one has just come; `room` is its."""
    stage = Stage()
    stage.engine("slow")
    stage.submit(samples)
    stage.ledger.state.engines["slow"].step_scale = 0.5
    stage.pass_time(2.0)
    stage.engine("fast", **room)
    stage.ledger.state.engines["fast"].step_scale = 0.01
    return stage


def test_an_idle_fast_engine_takes_from_a_slow_one_and_nothing_flaps() -> None:
    stage = slow_beside_fast(4)
    outcome = stage.pass_time(0.5)
    assert len(sent(outcome, Recall)) == 4
    assert not stage.pass_time(0.1).to_agents, "once is enough"
    assert {name: len(samples) for name, samples in stage.placed().items()} == {"slow": 4, "fast": 0}
    stage.give_back()
    assert {name: len(samples) for name, samples in stage.placed().items()} == {"slow": 0, "fast": 4}
    before = stage.placed()
    stage.pass_time_heard(10)
    assert stage.placed() == before


def test_prompts_that_an_engine_has_not_come_to_are_read_by_others() -> None:
    """The first engine with a step's weights gets all of it; by its steps alone it is as fast as the next (a placement
    benchmark's step took half as long again as need be)."""
    stage = Stage()
    stage.engine("first")
    stage.submit(8, prompt_ids=pack_ids([9] * 1_000))
    for name in ("second", "third", "unknown"):
        stage.engine(name)
    for engine in stage.ledger.state.engines.values():
        engine.step_scale, engine.half_batch, engine.prefill_s = 0.01, 1024.0, 0.005
    stage.ledger.state.engines["unknown"].step_scale = 0.0
    stage.ledger.state.engines["unknown"].pool = Pool.RESERVED
    stage.pass_time(1.5)
    recalled = [event for event in stage.events if isinstance(event, RecallSent)]
    assert sorted(event.to for event in recalled) == ["second", "third"], "each reads what comes before it gets more"
    assert {event.assignment for event in recalled} == {7, 8}, "what would be read last"


def test_room_that_is_set_aside_is_given_to_nobody_else_and_comes_free_again() -> None:
    stage = slow_beside_fast(2, max_running=2)
    stage.pass_time(0.5)
    stage.submit(1)
    assert stage.placed()["fast"] == [], "it goes where there is room"
    stage.tokens("slow", stage.number("0.0"), [5, 2], "stop")
    stage.submit(1)
    assert stage.placed()["fast"] == ["3.0"], "one of those it waited for has ended"
    stage.give_back()
    assert sorted(stage.placed()["fast"]) == ["1.0", "3.0"]


def test_a_sample_whose_new_engine_has_gone_waits_like_any_other() -> None:
    stage = slow_beside_fast(1)
    stage.pass_time(0.5)
    stage.agent("fast", Deregister("gone"))
    stage.give_back()
    assert stage.placed() == {"slow": ["0.0"]}


def _small(state: LedgerState) -> None:
    state.engines["fast"].capacity = msgspec.structs.replace(state.engines["fast"].capacity, kv_tokens=50)


def _moved(state: LedgerState, at: float, step_s: float) -> None:
    state.samples["0.0"].moved_at, state.engines["fast"].step_scale = at, step_s


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        pytest.param(lambda state, now: None, 1, id="nothing is against it"),
        pytest.param(lambda state, now: setattr(state.engines["fast"], "step_scale", 0.45), 0, id="hardly faster"),
        pytest.param(lambda state, now: setattr(state.engines["fast"], "version", 1), 0, id="of another version"),
        pytest.param(lambda state, now: setattr(state.engines["fast"], "failures", 1), 1, id="half open: one sample"),
        pytest.param(lambda state, now: setattr(state.engines["fast"], "quarantined_until", inf), 0, id="it pauses"),
        pytest.param(lambda state, now: _small(state), 0, id="no KV room"),
        pytest.param(
            lambda state, now: setattr(state.engines["slow"], "draining", "x"), 0, id="a drain with much time"
        ),
        pytest.param(lambda state, now: setattr(state.engines["slow"], "on_trial", True), 0, id="it measures"),
        pytest.param(lambda state, now: _moved(state, now - 4.9, 0.3), 0, id="it just moved"),
        pytest.param(lambda state, now: _moved(state, now - 5.1, 0.3), 1, id="it has rested"),
        pytest.param(lambda state, now: _moved(state, now - 4.9, 0.2), 1, id="it just moved, and gains much"),
        pytest.param(lambda state, now: setattr(state.assignments[1], "at", now - 0.9), 0, id="it just began"),
        pytest.param(lambda state, now: setattr(state, "balanced_at", now - 0.2), 0, id="the search pauses"),
        pytest.param(lambda state, now: setattr(state, "balanced_at", now - 0.3), 1, id="the pause is over"),
    ],
)
def test_what_speaks_against_a_move(change: Callable[[LedgerState, float], None], moves: int) -> None:
    stage = slow_beside_fast(1)
    change(stage.ledger.state, stage.now)
    transition = Transition(stage.ledger.state, stage.now)
    rebalance(transition, place(transition))
    assert sum(isinstance(event, RecallSent) for event in transition.effects.events) == moves


def test_what_waits_for_another_engine_stops_nobody() -> None:
    """A waiting sample that only a full engine could hold keeps no other engine from taking over."""
    stage = Stage()
    stage.engine("big", max_context=100_000, max_running=1)
    stage.submit(1, prompt_ids=bytes(4 * 50_000))
    stage.engine("slow")
    stage.submit(3)
    stage.ledger.state.engines["slow"].step_scale = 0.5
    stage.submit(1, prompt_ids=bytes(4 * 50_000))
    assert stage.ledger.state.queue
    stage.pass_time(2.0)
    stage.engine("fast")
    stage.ledger.state.engines["fast"].step_scale = 0.01
    assert len(sent(stage.pass_time(0.5), Recall)) == 3


def test_room_that_something_waiting_could_use_is_not_given_to_what_runs() -> None:
    stage = slow_beside_fast(2, kv_tokens=60)
    stage.submit(1, max_new_tokens=40)  # 50 tokens of KV room on "fast"
    stage.submit(1, max_new_tokens=40)
    assert stage.placed()["fast"] == ["2.0"]
    stage.ledger.state.engines["slow"].capacity = msgspec.structs.replace(
        stage.ledger.state.engines["slow"].capacity, max_running=2
    )
    assert not sent(stage.pass_time(0.5), Recall)


def test_one_sample_tries_an_engine_of_which_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "OPTIMISM", 0.5)
    stage = Stage()
    stage.engine("slow")
    stage.submit(4)
    stage.ledger.state.engines["slow"].step_scale = 0.5
    stage.pass_time(2.0)
    outcome = stage.engine("new")
    assert len(sent(outcome, Recall)) == 1
    assert not sent(stage.pass_time(0.5), Recall), "nothing more before it is measured"


@pytest.mark.parametrize("tokens", [0, 2], ids=["none", "two"])
def test_a_sample_that_tries_a_slow_engine_is_back_before_its_speed_is_measured(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It showed after half a second that it was ten times slower; until it was measured it cost a sample three, which
    was the last of its step. What it showed is remembered: nothing tries it again at once."""
    monkeypatch.setattr(speed, "OPTIMISM", 0.5)
    stage = Stage()
    stage.engine("own", Pool.RESERVED)
    stage.submit(4)
    stage.ledger.state.engines["own"].step_scale = 0.04
    stage.pass_time_heard(2.0)
    stage.engine("new")
    stage.give_back()
    (tried,) = stage.placed()["new"]
    stage.pass_time(0.4)
    if tokens:
        stage.tokens("new", stage.number(tried), [5] * tokens)
    stage.pass_time(0.4)
    stage.give_back()
    assert not stage.placed()["new"]
    assert stage.ledger.state.engines["new"].step_scale > 0.1
    stage.pass_time_heard(2.0)
    stage.give_back()
    assert not stage.placed()["new"]


@pytest.mark.parametrize(("waited_s", "leaves"), [(1.0, False), (4.0, True)], ids=["it reads", "it read long ago"])
def test_short_prompts_that_came_together_are_read_before_a_new_engine_shows_that_it_is_slow(
    waited_s: float, leaves: bool
) -> None:
    """Of short prompts nobody counts what is read. Eight take an engine as fast as any 1.3 s, and after 0.8 s all of
    them left it."""
    stage = Stage()
    stage.engine("own", Pool.RESERVED, max_running=64)
    own = stage.ledger.state.engines["own"]
    own.step_scale, own.prefill_s = 0.02, 0.0004
    stage.engine("new", max_running=64)
    stage.submit(16, prompt_ids=pack_ids([5] * 400))
    assert len(stage.placed()["new"]) == 8
    stage.pass_time_heard(waited_s)
    assert any(one.recall_cause for one in stage.ledger.state.assignments.values()) is leaves


@pytest.mark.parametrize(("waited_s", "leaves"), [(1.0, False), (3.0, True)], ids=["a little", "a window longer"])
def test_what_tries_an_engine_reads_there_no_longer_than_twice_as_at_home(waited_s: float, leaves: bool) -> None:
    """The engine read what it had been given before, for 26 s, while the trainer's own idled: the step took 1.8 times
    as long as on that alone."""
    stage = Stage()
    stage.engine("own", Pool.RESERVED, max_running=64, kv_tokens=100_000, max_context=10_000)
    stage.engine("slow", max_running=64, kv_tokens=100_000, max_context=10_000)
    own, slow = (stage.ledger.state.engines[name] for name in ("own", "slow"))
    own.step_scale, slow.step_scale = 10.0, 0.03
    stage.submit(1, prompt_ids=pack_ids([5] * 5_000))
    assert stage.placed()["slow"] == ["0.0"]
    own.step_scale, own.prefill_s, slow.step_scale, slow.on_trial = 0.03, 0.0001, 0.3, True
    stage.pass_time_heard(waited_s)
    assert any(one.recall_cause for one in stage.ledger.state.assignments.values()) is leaves


# --- engines that give no token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_engines_that_give_no_token_hand_a_sample_to_and_fro_no_longer(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agents say that they live, nothing of them was ever measured, and each looked better than the other."""
    monkeypatch.setattr(speed, "OPTIMISM", 0.5)
    engines = {"a": Speed(0.02), **{f"stuck{index}": Speed(0.02) for index in range(count)}}
    flow = Flow(engines, lambda sample, turn: 300)
    for name in engines:
        flow.engines[name].stuck = name != "a"
    flow.submit(count=4, n=1, max_new_tokens=400)
    flow.run(25.0)  # the progress deadline is 30 s
    assert not flow.ledger.state.assignments
    assert flow.ledger.state.counters.migrations["rebalanced"] <= 2 * 4


def test_one_that_was_left_for_giving_no_token_has_failed() -> None:
    stage = slow_beside_fast(1)
    engine = stage.ledger.state.engines["slow"]
    stage.pass_time_heard(speed.TOKENLESS_S + 1.0)
    assert engine.failures == 1
    assert engine.quarantined_until > speed.TOKENLESS_S


# --- what one pass may cost -------------------------------------------------------------------------------------------


def test_what_runs_is_read_in_parts_until_all_had_their_turn() -> None:
    stage = Stage()
    stage.engine("a", max_running=100)
    stage.submit(40)
    fleet, engine = Fleet(stage.ledger.state), stage.ledger.state.engines["a"]
    numbers = list(engine.running)
    read = [list(fleet.some_running(engine, 16)) for _ in range(len(numbers) // 16 + 1)]
    assert all(len(part) == 16 for part in read)
    assert {number for part in read for number in part} == set(numbers)
    assert list(fleet.some_running(engine, len(numbers))) == numbers


@pytest.mark.parametrize(
    ("known_s", "moves"),
    [
        pytest.param(0.02, True, id="it turned slow"),
        pytest.param(0.0, True, id="nothing was known of it"),
        pytest.param(0.5, False, id="as slow as it was known to be: they are there for that"),
    ],
)
def test_who_shows_another_speed_than_was_known_is_looked_at_at_once(known_s: float, moves: bool) -> None:
    """Nothing else may happen for a second: no turn ends, nobody comes."""
    stage = Stage()
    stage.engine("slow", max_running=16)
    stage.submit(1, max_new_tokens=1000)
    stage.engine("own", Pool.RESERVED, max_running=16)
    engines = stage.ledger.state.engines
    for name, step_s in (("own", 0.02), ("slow", known_s / (1 + 1 / speed.HALF_BATCH))):
        engines[name].step_scale, engines[name].token_at = step_s, stage.now
    asked: list[RecallSent] = []
    while stage.now < 4.0 and not asked:
        stage.now += 0.5
        for number in tuple(engines["slow"].running):
            stage.tokens("slow", number, [5])
        stage.tokens("own", 0, [])
        asked = [event for event in stage.events if isinstance(event, RecallSent)]
    assert engines["slow"].step_scale == pytest.approx(0.5, rel=0.1)
    assert bool(asked) is moves


def test_an_idle_engine_that_was_tried_and_is_faster_takes_over_at_once() -> None:
    stage = Stage()
    stage.engine("busy", max_running=16)
    stage.submit(1, max_new_tokens=1000)
    stage.engine("idle", max_running=16)
    engines = stage.ledger.state.engines
    for name, step_s in (("busy", 0.1), ("idle", 0.3)):
        engines[name].step_scale = step_s
    stage.now += 2.0
    stage.tokens("busy", 1, [5])
    engines["idle"].token_at = engines["idle"].assigned_at = -20.0
    assert not [event for event in stage.events if isinstance(event, RecallSent)]
    tried = WeightsLoaded(0, 0.1, load_seconds=0.1, bytes_pulled=1, step_seconds=0.01, tried_seconds_ago=0.0)
    assert sent(stage.agent("idle", tried), Recall)
