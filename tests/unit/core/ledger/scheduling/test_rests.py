"""Engines on the trainer's devices sleep while the learner needs them, and wake when there is something to generate."""

from __future__ import annotations

import msgspec
import pytest

from polyrl.ledger import Effects
from polyrl.ledger.causes import MoveCause, RestPhase
from polyrl.ledger.events import EngineGone, Moved
from polyrl.ledger.measures.rests import GIVE_UP_S
from polyrl.ledger.scheduling.rests import SLEEP_DEADLINE_S, WAKE_DEADLINE_S
from polyrl.ledger.scheduling.window import GROUPS_READ, REPLAN_S, opens_in
from polyrl.sample import DiscardReason, Pool, Purpose
from polyrl.wire import (
    Asleep,
    Assign,
    Batch,
    Deregister,
    EndStep,
    Fenced,
    GoToSleep,
    GroupDropped,
    HandBack,
    HandBackReason,
    HeldAssignment,
    Hello,
    Late,
    TrainerHello,
    WakeUp,
    WeightsLoaded,
    Withdraw,
    pack_ids,
)
from polyrl_rollout.testing.stage import Stage, sent


def shared(count: int = 2, others: int = 0, *, sleeps: bool = True) -> Stage:
    """An engine on the trainer's devices that can sleep, and others; groups of one run, the first is scored."""
    stage = Stage()
    stage.engine("r", Pool.RESERVED, sleeps=sleeps)
    for index in range(others):
        stage.engine(f"s{index}", max_running=8)
    stage.now += 1.0
    stage.submit(count)
    (number, *_) = stage.ledger.state.engines["r"].running
    sample = stage.ledger.state.assignments[number].sample
    stage.tokens("r", number, [5, 2], "stop")
    stage.score(sample)
    for engine in stage.ledger.state.engines.values():
        engine.step_scale = 0.02
    return stage


def learning(others: int = 0, count: int = 1) -> Stage:
    """The engine sleeps, and the learner has its batch."""
    stage = shared(count, others)
    stage.ask(alone=True)
    stage.agent("r", Asleep(0.5))
    return stage


def phase(stage: Stage) -> RestPhase:
    return stage.ledger.state.engines["r"].rest.phase


def loaded(version: int = 0) -> WeightsLoaded:
    return WeightsLoaded(version, 0.1, load_seconds=0.1, bytes_pulled=1)


def test_a_batch_that_needs_the_devices_alone_comes_when_their_engine_sleeps() -> None:
    stage = shared(1)
    asked = stage.ask(alone=True)
    assert sent(asked, GoToSleep) == [GoToSleep(SLEEP_DEADLINE_S, 1)]
    assert not sent(asked, Batch)
    assert stage.ledger.state.window_open
    stage.now += 2.0
    (batch,) = sent(stage.agent("r", Asleep(0.5)), Batch)
    assert len(batch.samples) == 1
    assert not stage.ledger.state.window_open
    assert stage.ledger.state.learner.rests.sleep_s == 2.0


@pytest.mark.parametrize(("alone", "sleeps"), [(False, True), (True, False)], ids=["there is room", "it cannot"])
def test_nobody_sleeps_where_there_is_room_or_an_engine_cannot(*, alone: bool, sleeps: bool) -> None:
    stage = shared(1, sleeps=sleeps)
    asked = stage.ask(alone=alone)
    assert sent(asked, Batch)
    assert not sent(asked, GoToSleep)


def test_evaluation_lets_nobody_sleep() -> None:
    stage = Stage()
    stage.engine("r", Pool.RESERVED, sleeps=True)
    stage.submit(1, purpose=Purpose.EVAL)
    stage.finish_all()
    assert sent(stage.ask(purpose=Purpose.EVAL), Batch)


def test_after_an_evaluation_the_learner_may_need_the_devices_for_rows_of_a_file() -> None:
    stage = Stage()
    stage.engine("r", Pool.RESERVED, sleeps=True)
    stage.submit(1, purpose=Purpose.EVAL)
    stage.finish_all()
    asked = stage.ask(purpose=Purpose.EVAL, alone=True)
    assert sent(asked, GoToSleep)
    assert not sent(asked, Batch)
    (batch,) = sent(stage.agent("r", Asleep(0.5)), Batch)
    stage.acknowledge(batch.number)
    assert phase(stage) is RestPhase.ASLEEP
    assert not stage.ledger.state.window_open, "an engine that comes meanwhile sleeps, too"
    assert stage.ledger.state.learner.tokens == 0, "what is learned is not what was delivered"
    submitted = stage.submit(1, purpose=Purpose.EVAL, step=1)
    assert not sent(submitted, WakeUp)
    assert sent(stage.ask(purpose=Purpose.EVAL, step=1), WakeUp), "the next evaluation wakes it"


def test_an_engine_of_another_pool_is_never_asked() -> None:
    stage = Stage()
    stage.engine("s", sleeps=True)
    stage.submit(1)
    stage.finish_all()
    asked = stage.ask(alone=True)
    assert sent(asked, Batch)
    assert not sent(asked, GoToSleep)


@pytest.mark.parametrize("pool", [Pool.SPOT, Pool.ON_DEMAND])
def test_an_engine_of_another_pool_does_not_sleep_whatever_it_says(pool: Pool) -> None:
    """Nobody would ever wake it."""
    stage = Stage()
    stage.engine("s", pool, sleeps=True)
    stage.agent("s", Asleep(0.5))
    stage.submit(1)
    assert len(stage.placed()["s"]) == 1
    assert stage.ledger.state.engines["s"].rest.phase is RestPhase.AWAKE


def test_what_it_runs_comes_back_with_its_tokens_and_waits_for_the_window() -> None:
    stage = shared(30, others=8)
    state = stage.ledger.state
    state.learner.token_s = 1.0
    stage.ask(alone=True)
    assert phase(stage) is RestPhase.FALLING
    for number in tuple(state.engines["r"].running):
        stage.tokens("r", number, [7])
        stage.agent("r", HandBack(number, HandBackReason.RECALLED))
    moved = [event.cause for event in stage.events if isinstance(event, Moved)]
    assert set(moved) == {MoveCause.WINDOW}
    assert not state.engines["r"].running
    assert sent(stage.agent("r", Asleep(0.5)), Batch)


def test_from_the_order_on_it_gets_nothing() -> None:
    stage = shared(1)
    stage.ask(alone=True)
    assert not sent(stage.submit(1), Assign)
    stage.agent("r", Asleep(0.5))
    assert not sent(stage.submit(1), Assign)
    assert not sent(stage.agent("r", loaded()), Assign), "said before it slept"


def test_the_window_wakes_it_and_what_it_served_before_is_no_fault() -> None:
    stage = learning()
    stage.submit(1)
    asked = stage.ask(alone=True)
    assert sent(asked, WakeUp)
    assert not sent(asked, Assign)
    stage.now += 3.0
    assert sent(stage.agent("r", loaded()), Assign)
    assert phase(stage) is RestPhase.AWAKE
    assert stage.ledger.state.learner.rests.wake_s == 3.0


def test_until_the_weights_that_are_wanted_are_there_it_sleeps_on() -> None:
    stage = learning()
    stage.submit(1, min_version=1, max_version=1)
    assert not sent(stage.ask(alone=True), WakeUp)
    assert sent(stage.publish(1), WakeUp)


def test_an_acknowledgement_ends_no_learning_that_needs_the_devices_alone() -> None:
    """Further epochs over the step followed it, and engines woke into them."""
    stage = learning(count=1)
    stage.submit(1)
    assert not sent(stage.acknowledge(0), WakeUp)
    assert not stage.ledger.state.window_open
    assert sent(stage.trainer(EndStep(stage.request(), 1, purpose=Purpose.TRAIN)), WakeUp)


def test_a_step_that_has_ended_wakes_nobody_before_there_is_something_to_generate() -> None:
    stage = learning(count=1)
    stage.acknowledge(0)
    assert not sent(stage.trainer(EndStep(stage.request(), 0, purpose=Purpose.TRAIN)), WakeUp)
    assert sent(stage.submit(1), WakeUp)


def test_one_that_has_not_started_is_asleep_and_starts_before_anything_is_submitted() -> None:
    stage = Stage()
    assert sent(stage.engine("r", Pool.RESERVED, -1, sleeps=True, asleep=True), WakeUp)


def test_one_that_sleeps_gets_no_work_though_it_says_that_it_serves() -> None:
    """Drawn at random: it ran a sample in its sleep, as far as the ledger knew."""
    stage = Stage()
    stage.submit(1)
    greeting = Hello(1, "r", pool=Pool.RESERVED, max_running=1, kv_tokens=100_000, max_context=4096, weight_version=0)
    assert not sent(stage.agent("r", msgspec.structs.replace(greeting, sleeps=True, asleep=True)), Assign)
    assert sent(stage.agent("r", greeting), Assign)


def test_a_first_start_says_nothing_of_what_waking_takes() -> None:
    stage = Stage()
    stage.engine("r", Pool.RESERVED, -1, sleeps=True, asleep=True)
    stage.now += 60.0
    stage.agent("r", loaded())
    assert phase(stage) is RestPhase.AWAKE
    assert stage.ledger.state.learner.rests.wake_s == 0.0


def test_one_that_comes_while_the_learner_needs_its_device_starts_later() -> None:
    stage = learning()
    assert not sent(stage.engine("t", Pool.RESERVED, -1, sleeps=True, asleep=True), WakeUp)
    assert sent(stage.engine("u", Pool.RESERVED, -1, sleeps=True), GoToSleep)


def test_one_that_greets_anew_is_ordered_again() -> None:
    stage = shared(1)
    stage.ask(alone=True)
    assert sent(stage.engine("r", Pool.RESERVED, -1, sleeps=True), GoToSleep)
    again = stage.engine("r", Pool.RESERVED, -1, sleeps=True, asleep=True)
    assert sent(again, GoToSleep)
    assert not sent(again, Batch)
    assert sent(stage.agent("r", Asleep(0.0)), Batch)


def test_one_that_greets_before_it_reads_an_order_to_wake_does_not_count_as_asleep() -> None:
    """Seed 3022262: its greeting crossed that order, and the batch was given while it woke."""
    stage = shared(1)
    stage.engine("t", Pool.RESERVED, -1, sleeps=True, asleep=True)
    stage.agent("r", Asleep(0.0))
    stage.submit(1)
    assert {one.rest.phase for one in stage.ledger.state.engines.values()} == {RestPhase.WAKING}
    due = stage.ledger.state.engines["t"].rest.due
    stage.now += 1.0
    again = stage.engine("t", Pool.RESERVED, -1, sleeps=True, asleep=True)
    assert sent(again, WakeUp)
    assert (stage.ledger.state.engines["t"].rest.phase, stage.ledger.state.engines["t"].rest.due) == (
        RestPhase.WAKING,
        due,
    )


@pytest.mark.parametrize("max_running", [8, 4], ids=["as before", "with another size"])
def test_one_that_greets_while_it_falls_asleep_has_no_more_time_than_before(max_running: int) -> None:
    """One that flapped got its 90 s anew each time, and held the trainer's devices without end."""
    stage = shared(1)
    stage.ask(alone=True, deadline_s=600.0)
    due = stage.now + GIVE_UP_S
    while stage.now < due - 2.0:
        stage.pass_time_heard(1.0)
        again = stage.engine("r", Pool.RESERVED, -1, sleeps=True, max_running=max_running)
        left_s = max(0.0, due - stage.now - (GIVE_UP_S - SLEEP_DEADLINE_S))
        assert [order.deadline_s for order in sent(again, GoToSleep)] == [pytest.approx(left_s)]
        assert phase(stage) is RestPhase.FALLING
    assert not sent(stage.agent("r", loaded()), Assign), "what it served before, it serves no longer"
    assert not sent(stage.submit(1), Assign)
    stage.tokens("r", 0, [])
    ended = stage.pass_time(due - stage.now)
    assert sent(ended, Fenced)
    assert sent(ended, Batch)


def test_how_long_falling_asleep_takes_counts_from_the_order_whoever_greets_meanwhile() -> None:
    stage = shared(1)
    stage.ask(alone=True)
    stage.now += 2.0
    stage.engine("r", Pool.RESERVED, -1, sleeps=True)
    stage.now += 1.0
    assert sent(stage.agent("r", Asleep(3.0)), Batch)
    assert stage.ledger.state.learner.rests.sleep_s == 3.0


def test_the_last_tokens_of_one_that_greets_while_it_falls_asleep_count() -> None:
    stage = shared(2)
    stage.ask(alone=True)
    (number,) = stage.ledger.state.engines["r"].running
    held = (HeldAssignment(number, stage.ledger.state.assignments[number].sample, 1, 0),)
    hello = Hello(
        1, "r", pool=Pool.RESERVED, max_running=8, kv_tokens=100_000, max_context=4096, weight_version=0, held=held,
        sleeps=True,
    )  # fmt: skip
    stage.agent("r", hello)
    stage.tokens("r", number, [7, 8])
    stage.agent("r", HandBack(number, HandBackReason.RECALLED))
    assert stage.ledger.state.counters.tokens_in_vain == 0
    assert sent(stage.agent("r", Asleep(0.5)), Batch)


def test_one_that_says_so_unasked_is_believed_and_runs_nothing() -> None:
    """It was ordered by a manager that has lost that with its machine."""
    stage = shared(2)
    assert stage.ledger.state.engines["r"].running
    assert sent(stage.agent("r", Asleep(1.0)), WakeUp)
    assert not stage.ledger.state.engines["r"].running
    stage.engine("s", Pool.SPOT)
    stage.agent("s", Asleep(1.0))
    assert stage.ledger.state.counters.ignored == {"asleepUnasked": 1}


def test_one_that_does_not_sleep_is_given_up_and_the_learner_waits_no_longer() -> None:
    stage = shared(1)
    stage.ask(alone=True, deadline_s=600.0)
    while stage.now < GIVE_UP_S:
        stage.pass_time_heard(1.0)
    assert not [event for event in stage.events if isinstance(event, EngineGone)]
    assert stage.ledger.next_due() == pytest.approx(1.0 + GIVE_UP_S)
    stage.now = 1.0 + GIVE_UP_S - 1e-3
    stage.tokens("r", 0, [])
    ended = stage.pass_time(2e-3)
    assert sent(ended, Fenced)
    assert sent(ended, Batch)
    assert [event.cause for event in stage.events if isinstance(event, EngineGone)] == ["awake"]


def silent(stage: Stage, seconds: int) -> list[Batch]:
    """Nothing is heard of any engine; batches that were given meanwhile."""
    return [batch for _ in range(seconds) for batch in sent(stage.pass_time(1.0), Batch)]


def test_the_second_answer_to_an_order_given_twice_is_none_to_the_next_order() -> None:
    """It reads WakeUp and the next order only then, and would wake beside the learner."""
    stage = shared(1)
    stage.engine("s")
    stage.ledger.state.engines["s"].step_scale = 0.001
    (first,) = sent(stage.ask(alone=True, request=900), GoToSleep)
    (again,) = sent(greets(stage), GoToSleep)
    stage.trainer(Withdraw(stage.request(), 900))
    stage.submit(1)
    stage.ledger.state.learner.token_s = 1.0
    stage.agent("r", Asleep(1.0, first.order))
    assert phase(stage) is RestPhase.WAKING
    (second,) = sent(stage.ask(alone=True), GoToSleep)
    assert not sent(stage.agent("r", Asleep(0.0, again.order)), Batch)
    assert phase(stage) is RestPhase.FALLING
    assert sent(stage.agent("r", Asleep(0.0, second.order)), Batch)


def greets(stage: Stage, *, asleep: bool = False) -> Effects:
    return stage.engine("r", Pool.RESERVED, -1, sleeps=True, asleep=asleep)


def test_numbers_of_orders_count_on_after_a_lease() -> None:
    stage = shared(1)
    (first,) = sent(stage.ask(alone=True, request=900), GoToSleep)
    stage.trainer(Withdraw(stage.request(), 900))
    stage.agent("r", Deregister("broken"))
    greets(stage)
    (second,) = sent(stage.ask(alone=True), GoToSleep)
    assert second.order > first.order


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered to sleep", "awake"])
def test_one_that_is_silent_may_still_hold_its_memory(*, ordered: bool) -> None:
    """It was given up after 15 s, and the learner got its device beside a frozen agent's engine."""
    stage = shared(2)
    if ordered:
        stage.ask(alone=True, deadline_s=600.0)
    assert not silent(stage, 17)
    assert not stage.ledger.state.engines["r"].running, "what it ran goes on elsewhere"
    if not ordered:
        assert not sent(stage.ask(alone=True, deadline_s=600.0), Batch)
    assert not silent(stage, int(GIVE_UP_S) - 20)
    assert "r" in stage.ledger.state.engines
    assert silent(stage, 23)
    assert "r" not in stage.ledger.state.engines


def test_one_that_is_silent_asleep_holds_nothing() -> None:
    stage = learning()
    silent(stage, 17)
    assert "r" not in stage.ledger.state.engines


def test_a_silent_one_that_is_started_again_keeps_the_learner_no_longer() -> None:
    stage = shared(1)
    stage.ask(alone=True, deadline_s=600.0)
    silent(stage, 17)
    (order,) = sent(greets(stage, asleep=True), GoToSleep)
    assert sent(stage.agent("r", Asleep(0.0, order.order)), Batch)


def test_one_that_wakes_by_an_order_of_a_lease_that_is_over_is_sent_to_sleep() -> None:
    stage = learning()
    asked = stage.agent("r", loaded())
    assert phase(stage) is RestPhase.FALLING
    assert sent(asked, GoToSleep)


def test_one_that_is_taken_for_asleep_while_the_window_is_open_serves_by_its_word() -> None:
    stage = Stage()
    greets(stage, asleep=True)
    stage.engine("s")
    stage.ledger.state.engines["r"].rest.phase = RestPhase.ASLEEP
    stage.agent("r", loaded())
    assert phase(stage) is RestPhase.AWAKE
    assert stage.ledger.state.engines["r"].version == 0


def test_one_that_does_not_wake_in_time_greets_anew() -> None:
    """It was counted on no more, and waited for without end."""
    stage = learning()
    stage.submit(1)
    assert sent(stage.ask(alone=True, deadline_s=10 * WAKE_DEADLINE_S), WakeUp)
    while "r" in stage.ledger.state.engines and stage.now < 2 * WAKE_DEADLINE_S:
        stage.pass_time_heard(10)
    assert [event.cause for event in stage.events if isinstance(event, EngineGone)] == ["asleep"]
    assert stage.now == pytest.approx(1.0 + WAKE_DEADLINE_S, abs=11.0)


def test_a_batch_that_comes_too_late_for_it_names_it() -> None:
    stage = shared(1)
    stage.ask(alone=True, deadline_s=5.0)
    (late,) = sent(stage.pass_time(5.0), Late)
    assert late.waiting_for.endswith("a batch waits until r sleeps, for 5.0 s")


def test_one_that_breaks_meanwhile_keeps_nobody() -> None:
    stage = shared(1)
    stage.ask(alone=True)
    assert sent(stage.agent("r", Deregister("engine failed")), Batch)


def test_after_a_request_that_came_to_nothing_it_wakes() -> None:
    stage = shared(1)
    stage.ask(alone=True, deadline_s=5.0)
    assert sent(stage.pass_time(5.0), Late)
    stage.submit(1)
    assert sent(stage.agent("r", Asleep(1.0)), WakeUp)


def test_another_trainer_finds_the_window_open_and_engines_awake() -> None:
    stage = learning()
    stage.submit(1)
    assert sent(stage.trainer(TrainerHello(1, -1, trainer="another")), WakeUp) or sent(stage.ask(alone=True), WakeUp)


def test_where_others_are_done_sooner_than_it_would_be_awake_it_sleeps_on_and_is_looked_at_again() -> None:
    stage = learning(others=2)
    stage.ledger.state.learner.rests.wake_s = 100.0
    for name in ("s0", "s1"):
        stage.ledger.state.engines[name].step_scale = 0.5
    stage.submit(2)
    assert not sent(stage.ask(alone=True), WakeUp)
    assert stage.now < (stage.ledger.next_due() or 0.0) <= stage.now + 0.25
    stage.agent("s0", Deregister("spot"))
    assert sent(stage.agent("s1", Deregister("spot")), WakeUp), "nobody else is left"


def counted_on(context: int = 4096) -> Stage:
    """The engine sleeps, and two others would be done long before it is awake."""
    stage = learning()
    for name in ("s0", "s1"):
        stage.engine(name, max_context=context)
        stage.ledger.state.engines[name].step_scale = 0.02
    stage.ledger.state.learner.rests.wake_s = 100.0
    return stage


@pytest.mark.parametrize(("context", "wakes"), [(11, False), (10, True)], ids=["one more token fits", "none fits"])
def test_what_is_too_long_for_all_others_wakes_it(context: int, wakes: bool) -> None:
    """A prompt of 10 tokens waited until its batch was given up, for others that could not hold it."""
    stage = counted_on(context)
    stage.submit(1)
    assert bool(sent(stage.ask(alone=True), WakeUp)) is wakes


@pytest.mark.parametrize(("newest", "dropped"), [(1, []), (0, [DiscardReason.STALE])], ids=["served", "left behind"])
def test_what_is_of_a_version_that_all_others_have_left_behind_wakes_nobody(
    newest: int, dropped: list[DiscardReason]
) -> None:
    """Who wakes loads the newest."""
    stage = counted_on()
    stage.publish(1)
    for name in ("s0", "s1"):
        stage.agent(name, loaded(1))
        stage.ledger.state.engines[name].step_scale = 0.02
    notices = sent(stage.submit(1, max_version=newest), GroupDropped)
    assert [notice.reason for notice in notices] == dropped
    assert not sent(stage.ask(alone=True), WakeUp)


def test_where_others_take_long_it_wakes() -> None:
    stage = learning(others=1)
    stage.ledger.state.learner.rests.wake_s = 1.0
    stage.ledger.state.engines["s0"].step_scale = 5.0
    stage.submit(8)
    assert sent(stage.ask(alone=True), WakeUp)


def test_who_waits_for_the_window_counts_the_seconds_to_wake() -> None:
    stage = learning()
    stage.ledger.state.learner.rests.wake_s = 7.0
    engine = stage.ledger.state.engines["r"]
    asleep = opens_in(stage.ledger.state, engine, stage.now)
    engine.rest.phase = RestPhase.AWAKE
    assert asleep - opens_in(stage.ledger.state, engine, stage.now) == pytest.approx(7.0)


def keeping(kept: int, context: int = 4096) -> Stage:
    """The engine sleeps, so many groups are kept until a checkpoint contains them, and two others generate."""
    stage = Stage()
    stage.trainer(TrainerHello(1, -1, trainer="t", covers=True))
    stage.engine("r", Pool.RESERVED, sleeps=True, max_running=1024, kv_tokens=10**7)
    stage.submit(kept)
    while stage.ledger.state.assignments:
        stage.finish_all()
        stage.pass_time(0.1)
    stage.ask(kept, 10**6, alone=True)
    (batch,) = sent(stage.agent("r", Asleep(1.0)), Batch)
    stage.acknowledge(batch.number)
    for name in ("s0", "s1") if context else ():
        stage.engine(name, max_context=context)
        stage.ledger.state.engines[name].step_scale = 0.02
    stage.ledger.state.learner.rests.wake_s = 1000.0
    return stage


def test_what_is_kept_for_a_checkpoint_hides_nothing_that_waits() -> None:
    """Looked for among the first 512 groups, of which all were trained, nothing was found to wake for."""
    stage = keeping(512, context=0)
    stage.submit(4, step=1)
    assert sent(stage.ask(step=1, alone=True), WakeUp)


@pytest.mark.parametrize("waiting", range(2))
def test_what_is_kept_for_a_checkpoint_hides_nothing_that_only_it_can_hold(waiting: int) -> None:
    """Every second group was read of so many, and of a step of one group it was the other one, for ever."""
    stage = keeping(600 + waiting, context=10)
    stage.submit(1, step=1)
    assert sent(stage.ask(step=1, alone=True), WakeUp)


@pytest.mark.parametrize("place", [0, 1])
def test_of_a_large_step_another_part_is_read_at_each_look(place: int) -> None:
    """The first or the last group is the one that only it can hold."""
    stage = keeping(1, context=20)
    for length in (30, 10) if place else (10, 30):
        stage.submit(1 if length == 30 else 2 * GROUPS_READ - 1, step=1, prompt_ids=pack_ids([9] * length))
    woken = sent(stage.ask(step=1, alone=True), WakeUp)
    assert woken or sent(stage.pass_time(REPLAN_S), WakeUp)


def test_of_a_large_step_that_is_ready_for_the_most_part_what_is_left_is_found() -> None:
    """Its end was read with the same stride as what was ready."""
    stage = keeping(1)
    for name in ("s0", "s1"):
        stage.engine(name, max_running=1024, kv_tokens=10**7)
    stage.submit(2 * GROUPS_READ + 1, step=1)
    last = f"{stage.ledger.state.next_group - 1}.0"
    while stage.ledger.state.queue or len(stage.ledger.state.assignments) > 1:
        for number, assignment in tuple(stage.ledger.state.assignments.items()):
            if assignment.sample != last:
                stage.tokens(assignment.engine, number, [5, 2], "stop")
                stage.score(assignment.sample)
        stage.pass_time(0.01)
    stage.ledger.state.learner.rests.wake_s = 1.0
    for name in ("s0", "s1"):
        stage.ledger.state.engines[name].step_scale = 50.0
    assert sent(stage.ask(2 * GROUPS_READ + 1, 10**5, step=1, alone=True), WakeUp)
