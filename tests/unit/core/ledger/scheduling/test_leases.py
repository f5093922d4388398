"""Deadlines: leases, drains, progress, weights, and the manager's own absence."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest

from polyrl.ledger import Ledger, fleet
from polyrl.ledger.apply import engines
from polyrl.ledger.events import VerdictRequested
from polyrl.ledger.scheduling import leases
from polyrl.sample import DiscardReason
from polyrl.wire import (
    Announce,
    Assign,
    Cancel,
    Deltas,
    Deregister,
    Fenced,
    GroupDropped,
    HandBack,
    Heartbeat,
    Hello,
    Leaving,
    StartDrain,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
)
from polyrl_rollout.testing.stage import Stage, sent


def two_engines() -> Stage:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.engine("b")
    return stage


def test_next_due_is_a_lease_away_and_early_ticks_are_harmless() -> None:
    stage = Stage()
    assert stage.ledger.next_due() is None
    stage.engine("a")
    assert stage.ledger.next_due() == 3.0
    assert not stage.pass_time(1.0).to_agents


def test_a_silent_engines_sample_goes_where_there_is_room_and_the_engine_is_gone_later() -> None:
    stage = two_engines()
    stage.now = 2.0
    stage.agent("b", Heartbeat(0, 0, kv_free_tokens=100))
    stage.now = 3.0
    assert [assign.sample for assign in sent(stage.pass_time(0.0), Assign)] == ["0.0"]
    assert {engine.name: engine.state for engine in stage.ledger.status(stage.now).engines} == {
        "a": "silent",
        "b": "serving",
    }
    pass_until(stage, "b", 14.9)
    assert sorted(stage.ledger.state.engines) == ["a", "b"]
    pass_until(stage, "b", 15.1)
    assert list(stage.ledger.state.engines) == ["b"]
    status = stage.ledger.status(stage.now)
    assert (status.engines_lost, stage.ledger.state.counters.migrations) == (1, {"lost": 1})


def pass_until(stage: Stage, engine: str, until: float) -> None:
    """Time passes, and one engine is heard of."""
    while stage.now < until:
        stage.now = min(until, stage.now + 1.0)
        stage.agent(engine, Heartbeat(0, 0, kv_free_tokens=100_000))
        stage.pass_time(0.0)


def silent_beside_a_full_one() -> Stage:
    """At 4 s a is silent with sample 0.0; b, which has room for one, runs 1.0, and 2.0 waits."""
    stage = Stage()
    stage.engine("a", max_running=1)
    stage.submit()
    stage.engine("b", max_running=1)
    stage.submit(2)
    pass_until(stage, "b", 4.0)
    return stage


def test_without_room_elsewhere_a_silent_engine_keeps_what_it_runs_and_gets_nothing_new() -> None:
    stage = silent_beside_a_full_one()
    assert stage.placed() == {"a": ["0.0"], "b": ["1.0"]}
    stage.agent("a", Heartbeat(1, 0, kv_free_tokens=100_000))
    assert stage.placed() == {"a": ["0.0"], "b": ["1.0"]}, "it is back, with what it ran"
    stage.tokens("a", stage.number("0.0"), [5, 2], "stop")
    assert stage.placed() == {"a": ["2.0"], "b": ["1.0"]}
    assert not stage.ledger.state.counters.migrations


def test_what_a_silent_engine_runs_takes_its_turn_before_what_is_younger() -> None:
    stage = silent_beside_a_full_one()
    stage.tokens("b", stage.number("1.0"), [5, 2], "stop")
    assert stage.placed() == {"a": [], "b": ["0.0"]}


def test_after_the_longer_silence_its_samples_wait_for_others() -> None:
    stage = silent_beside_a_full_one()
    pass_until(stage, "b", 15.0)
    assert stage.placed() == {"b": ["1.0"]}
    assert stage.ledger.state.samples["0.0"].phase == "waiting"


def test_a_short_silence_is_sat_out_where_moving_would_cost_more() -> None:
    """b needs ten times as long for a token; a has said nothing for 3 s of the 20 s that its sample still takes."""
    stage = two_engines()
    for name, step_s in (("a", 0.2), ("b", 2.0)):
        engine = stage.ledger.state.engines[name]
        engine.step_scale, engine.half_batch = step_s, 1000.0
    pass_until(stage, "b", 14.9)
    assert stage.placed() == {"a": ["0.0"], "b": []}
    assert stage.ledger.next_due() == pytest.approx(15.0, abs=0.11)
    pass_until(stage, "b", 15.1)
    assert stage.placed() == {"b": ["0.0"]}


def test_who_waits_for_the_silent_pays_more_from_second_to_second_and_is_looked_at_in_time() -> None:
    stage = two_engines()
    for name, step_s in (("a", 0.2), ("b", 0.6)):
        engine = stage.ledger.state.engines[name]
        engine.step_scale, engine.half_batch = step_s, 1000.0
    pass_until(stage, "b", 3.0)
    assert stage.placed() == {"a": ["0.0"], "b": []}
    while stage.placed()["a"]:
        due = stage.ledger.next_due()
        assert due is not None
        stage.pass_time(due - stage.now)
    assert 4.0 < stage.now < 6.0


def test_a_fleet_with_room_does_not_wait_for_the_dead() -> None:
    """Sixty-four samples of one engine go to others within the first second after its lease."""
    stage = Stage()
    stage.engine("a", max_running=64)
    stage.submit(64)
    for name in "bcd":
        stage.engine(name, max_running=64)
    for second in range(1, 5):
        stage.now = float(second)
        for name in "bcd":
            stage.agent(name, Heartbeat(0, 0, kv_free_tokens=100_000))
        stage.pass_time(0.0)
    assert not stage.placed()["a"]
    assert sum(len(samples) for samples in stage.placed().values()) == 64


class Unheard(Stage):
    """Six engines of two samples each fall silent; what a look has found stays with its ledger."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(6):
            self.engine(f"s{index}", max_running=2)
        self.submit(12)
        self.pass_time(3.1)

    def _current(self) -> Ledger:
        return self.ledger


def test_of_many_silent_engines_each_look_reads_a_part_and_all_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end of a turn elsewhere read all that a cloud ran which was cut off: 60 ms for 1,600 engines."""
    stage = Unheard()
    assert stage.ledger.fleet.some_silent()[1] is False
    monkeypatch.setattr(fleet, "SILENT_READ", 3)
    parts = [[engine.name for engine in stage.ledger.fleet.some_silent()[0]] for _ in range(3)]
    assert parts == [["s0", "s1"], ["s2", "s3"], ["s4", "s5"]]
    stage.engine("there", max_running=64)
    later = 0
    while len(stage.placed()["there"]) < 12:
        due = stage.ledger.next_due()
        assert due is not None
        assert due <= stage.now + 0.2, "the next look comes in time, whatever happens"
        stage.now = due
        stage.agent("there", Heartbeat(0, 0, kv_free_tokens=100_000))
        stage.pass_time(0.0)
        later += 1
    assert later >= 2


@pytest.mark.parametrize("greets", [False, True], ids=["a heartbeat", "a greeting"])
def test_a_whole_fleet_that_fell_silent_is_back_however_many_it_is(
    greets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "VANISHED_MEMORY", 2)
    stage = Stage()
    for name in "abc":
        stage.engine(name)
    stage.pass_time(4.0)
    for name in "abc":
        if greets:
            stage.engine(name)
        stage.agent(name, Heartbeat(0, 0, kv_free_tokens=100))
    assert [one.silent for one in stage.ledger.state.engines.values()] == [False] * 3
    stage.submit(count=3)
    assert all(stage.placed().values())


def test_an_engine_of_a_fleet_too_large_to_be_remembered_is_back_with_its_greeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "VANISHED_MEMORY", 0)
    stage = Stage()
    stage.engine("a")
    stage.pass_time(4.0)
    stage.engine("a", version=-1)
    assert not stage.ledger.state.engines["a"].silent


def test_bye_is_no_loss() -> None:
    stage = two_engines()
    assert sent(stage.agent("a", Deregister("done")), Assign)
    assert stage.ledger.status(0.0).engines_lost == 0


def test_only_the_greeted_are_believed() -> None:
    stage = Stage()
    assert sent(stage.agent("ghost", Heartbeat(0, 0, kv_free_tokens=0)), Fenced)
    assert sent(stage.agent("ghost", Deltas(1, 0, rows=b"", ids=b"", logprobs=b"")), Fenced)
    pool = Stage().ledger.state.engines
    assert pool == {}


def test_greetings_that_cannot_be_are_fenced() -> None:
    stage = Stage()
    for hello in (
        Hello(2, "a", pool="spot", max_running=8, kv_tokens=8, max_context=8, weight_version=-1),  # type: ignore[arg-type]
        Hello(1, "other", pool="spot", max_running=8, kv_tokens=8, max_context=8, weight_version=-1),  # type: ignore[arg-type]
        Hello(1, "a", pool="spot", max_running=0, kv_tokens=8, max_context=8, weight_version=-1),  # type: ignore[arg-type]
    ):
        outcome = stage.agent("a", hello)
        assert sent(outcome, Fenced)
        assert not sent(outcome, Welcome)


def test_a_drain_is_said_once_takes_no_new_work_and_moves_the_rest_at_its_deadline() -> None:
    stage = two_engines()
    assert [drain.deadline_s for drain in sent(stage.drain("a", 20.0), StartDrain)] == [20.0]
    assert not stage.drain("a", 20.0).to_agents
    assert not stage.drain("a", 90.0).to_agents
    assert [drain.deadline_s for drain in sent(stage.drain("a", 10.0), StartDrain)] == [10.0]
    stage.submit(8)
    assert len(stage.placed()["a"]) == 1, "what can be finished in time stays"
    stage.pass_time_heard(9.0)
    assert len(stage.placed()["a"]) == 1, "nobody else has room"
    outcome = stage.pass_time(1.0)
    assert sent(outcome, Cancel)
    assert len(stage.placed()["a"]) == 0
    assert "a" in stage.ledger.state.engines, "it leaves by Deregister or by its lease"
    assert not stage.drain("a", 1.0).to_agents
    assert not stage.drain("nobody", 1.0).to_agents


def test_a_notice_is_a_drain() -> None:
    stage = two_engines()
    assert sent(stage.agent("a", Leaving(5.0, "spot")), StartDrain)
    stage.agent("a", HandBack(1, "draining"))
    assert stage.placed() == {"a": [], "b": ["0.0"]}


def test_no_tokens_for_the_progress_deadline_moves_the_sample_and_suspects_the_engine() -> None:
    stage = two_engines()
    for _ in range(30):
        stage.now += 1.0
        stage.agent("a", Heartbeat(1, 0, kv_free_tokens=0))
        stage.agent("b", Heartbeat(0, 0, kv_free_tokens=0))
        stage.pass_time(0.0)
    assert stage.placed() == {"a": [], "b": ["0.0"]}
    states = {engine.name: engine.state for engine in stage.ledger.status(stage.now).engines}
    assert states == {"a": "suspect", "b": "serving"}


def test_an_engine_that_serves_others_is_not_suspect_for_one_stuck_sample() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(2)
    for _ in range(30):
        stage.now += 1.0
        stage.tokens("a", 1, [5])
        stage.pass_time(0.0)
    assert stage.ledger.state.counters.migrations == {"stalled": 1}
    assert stage.ledger.state.engines["a"].failures == 0


def test_pauses_double_and_are_bounded() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    pauses = []
    for _ in range(9):
        stage.agent("a", HandBack(stage.number("0.0"), "engineError"))
        pause = stage.ledger.state.engines["a"].quarantined_until - stage.now
        pauses.append(round(pause))
        stage.pass_time_heard(pause + 1)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_failed_weights_are_announced_again() -> None:
    stage = Stage()
    stage.engine("a", version=-1)
    stage.agent("a", WeightsFailed(0, -1, reason="no room"))
    for _ in range(4):
        stage.now += 1.0
        assert not sent(stage.agent("a", Heartbeat(0, 0, kv_free_tokens=0)), Announce)
        assert not sent(stage.pass_time(0.0), Announce)
    stage.now += 1.0
    stage.agent("a", Heartbeat(0, 0, kv_free_tokens=0))
    assert sent(stage.pass_time(0.0), Announce)


def test_what_an_engine_says_of_older_weights_puts_off_no_announcement() -> None:
    """An agent without work says what it serves whenever it has tried its engine."""
    stage = Stage()
    stage.engine("a")
    stage.publish(1)
    stage.agent("a", WeightsFailed(1, 0, reason="the publisher is away"))
    stage.now += 1.0
    stage.agent("a", WeightsLoaded(0, 0.0, load_seconds=0.0, bytes_pulled=0))
    stage.now += 4.0
    stage.agent("a", Heartbeat(0, 0, kv_free_tokens=0))
    assert sent(stage.pass_time(0.0), Announce)


def test_an_engine_that_lost_its_weights_keeps_nothing_that_it_ran() -> None:
    stage = two_engines()
    outcome = stage.agent("a", WeightsFailed(1, -1, reason="half of it was loaded"))
    assert sent(outcome, Cancel)
    assert stage.placed() == {"a": [], "b": ["0.0"]}


def test_a_new_version_moves_what_may_not_use_it() -> None:
    stage = two_engines()
    stage.publish(1)
    outcome = stage.agent("a", WeightsLoaded(1, 0.1, load_seconds=0.1, bytes_pulled=1))
    assert sent(outcome, Cancel)
    assert stage.placed() == {"a": [], "b": ["0.0"]}
    (dropped,) = sent(stage.agent("b", WeightsLoaded(1, 0.1, load_seconds=0.1, bytes_pulled=1)), GroupDropped)
    assert dropped.reason is DiscardReason.STALE


def test_our_own_absence_costs_nobody_the_lease() -> None:
    stage = two_engines()
    stage.pass_time(60.0)
    assert set(stage.ledger.state.engines) == {"a", "b"}
    assert stage.placed()["a"] == ["0.0"]
    stage.pass_time(3.0)
    assert {engine.state for engine in stage.ledger.status(stage.now).engines} == {"silent"}
    stage.pass_time(12.0)
    assert stage.ledger.state.engines == {}


def test_our_own_absence_brings_no_silent_engine_back() -> None:
    """It still runs what was moved away from it, and was given a sample on top of that (found by a random schedule)."""
    stage = two_engines()
    pass_until(stage, "b", 3.0)
    assert stage.placed() == {"a": [], "b": ["0.0"]}
    stage.now = 12.0
    stage.agent("b", Heartbeat(0, 0, kv_free_tokens=100_000))
    assert {engine.name: engine.state for engine in stage.ledger.status(stage.now).engines}["a"] == "silent"
    (fenced,) = sent(stage.agent("a", Heartbeat(1, 0, kv_free_tokens=0)), Fenced)
    assert fenced.lease_over
    assert "a" in stage.ledger.state.engines


def test_waits_name_everyone() -> None:
    stage = Stage()
    stage.engine("a", version=-1)
    stage.submit()
    stage.ask()
    text = "\n".join(wait.sentence(1.0) for wait in stage.ledger.waits(1.0))
    for part in ("any engine that serves version 0 (there is none)", "sign of life from a", "weight version 0 from a"):
        assert part in text


def test_a_drained_sample_that_no_version_may_go_on_with_is_stale_at_once() -> None:
    stage = Stage()
    stage.engine("a")
    stage.engine("b", version=-1)
    stage.submit()
    stage.publish(1)
    stage.agent("b", WeightsLoaded(1, 0.1, load_seconds=0.1, bytes_pulled=1))
    stage.drain("a", 1.0)
    (dropped,) = sent(stage.agent("a", HandBack(1, "draining")), GroupDropped)
    assert dropped.reason is DiscardReason.STALE


def test_an_engine_that_switches_versions_waits_for_its_word_and_is_not_suspect() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(max_version=1)
    stage.publish(1)
    stage.agent("a", HandBack(1, "versionChanged"))
    assert stage.placed() == {"a": []}
    stage.agent("a", WeightsLoaded(1, 0.1, load_seconds=0.1, bytes_pulled=1))
    assert stage.placed() == {"a": ["0.0"]}
    stage.submit(4, max_version=1)
    assert len(stage.placed()["a"]) == 5


def test_after_a_restart_engines_get_longer_than_a_lease_to_come_back() -> None:
    stage = two_engines()
    stage.now = 60.0
    stage.ledger.resume(stage.now)
    stage.pass_time(0.0)
    for seconds in (3.0, 3.0, stage.ledger.state.config.return_s - 6.1):
        stage.pass_time(seconds)
    assert stage.placed() == {"a": ["0.0"], "b": []}
    stage.agent("b", Heartbeat(0, 0, kv_free_tokens=100))
    stage.pass_time(0.1)
    assert stage.placed() == {"a": [], "b": ["0.0"]}


def test_an_engine_that_was_heard_once_after_a_restart_has_a_lease_of_the_usual_length() -> None:
    """It was missed only when the longer one would have ended, which nobody has who was heard."""
    stage = Stage()
    stage.engine("a")
    stage.now += 100.0
    stage.ledger.resume(stage.now)
    stage.pass_time(0.0)
    stage.now += 1.0
    stage.agent("a", Heartbeat(0, queued=0, kv_free_tokens=100))
    heard_at = stage.now
    while not stage.ledger.state.engines["a"].silent:
        stage.pass_time((stage.ledger.next_due() or inf) - stage.now)
    assert stage.now == pytest.approx(heard_at + stage.ledger.state.config.lease_s, abs=0.2)


@pytest.mark.parametrize(
    ("again_s", "ends_s", "sent_again"),
    [
        pytest.param(5.0, 5.0, True, id="an earlier deadline wins"),
        pytest.param(20.0, 10.0, False, id="a later one does not"),
        pytest.param(10.0, 10.0, False, id="nor the same"),
        pytest.param(-3.0, 0.0, True, id="one that has passed is now"),
        pytest.param(float("inf"), 0.0, True, id="no deadline at all is now"),
    ],
)
def test_a_second_drain(again_s: float, ends_s: float, sent_again: bool) -> None:
    stage = two_engines()
    stage.drain("a", 10.0)
    outcome = stage.drain("a", again_s)
    assert bool(sent(outcome, StartDrain)) is sent_again
    drained = stage.ledger.state.engines["a"]
    assert drained.drain_at == stage.now + ends_s


@pytest.mark.parametrize(
    ("first_token", "read_ago_s", "left_s"),
    [
        pytest.param(True, 0.0, 10.0, id="it generates: its last token counts"),
        pytest.param(False, None, 10.0, id="nothing was read since it came"),
        pytest.param(False, 5.0, 25.0, id="its engine read another prompt since"),
    ],
)
def test_how_long_no_progress_is_forgiven(first_token: bool, read_ago_s: float | None, left_s: float) -> None:
    """20 s after the sample came, or got its first token."""
    stage = Stage()
    stage.engine("a")
    stage.submit()
    assignment = stage.ledger.state.assignments[1]
    engine = stage.ledger.state.engines["a"]
    if first_token:
        assignment.at -= 1.0
    now = assignment.progress_at + 20.0
    if read_ago_s is not None:
        engine.read_at = now - read_ago_s
    engine.heard_at = now
    assert leases._progress_deadline(stage.ledger.state, assignment) - now == left_s


def test_between_two_questions_no_awaited_verdict_is_read() -> None:
    stage = Stage()
    stage.engine("a", max_running=64)
    stage.submit(40)
    stage.pass_time(0.0)
    assert stage.ledger.state.ask_due == inf
    for number, assignment in tuple(stage.ledger.state.assignments.items()):
        stage.tokens(assignment.engine, number, [5, 2], "stop")
    asked = [event for event in stage.events if isinstance(event, VerdictRequested)]
    assert not asked
    assert stage.ledger.state.ask_due == pytest.approx(10.0)
    stage.agent("a", Deregister("done"))
    stage.pass_time(9.0)
    assert stage.ledger.next_due() == pytest.approx(10.0)

    class Unread(dict[str, None]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("read")

    awaiting = stage.ledger.state.awaiting_verdict
    stage.ledger.state.awaiting_verdict = Unread(awaiting)
    stage.pass_time(0.5)
    stage.ledger.state.awaiting_verdict = awaiting
    stage.pass_time(0.5)
    assert sum(isinstance(event, VerdictRequested) for event in stage.events) == 40
    assert stage.ledger.state.ask_due == pytest.approx(30.0)
