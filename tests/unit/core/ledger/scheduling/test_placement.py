"""Where work goes: placement, the reserved window, speed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from polyrl.ledger import LedgerConfig, speed
from polyrl.ledger.scheduling import cost, placement
from polyrl.ledger.state import SamplePhase
from polyrl.sample import DiscardReason, Group, Pool, Purpose, SamplingParams
from polyrl.wire import (
    Assign,
    Deregister,
    GroupDropped,
    HandBack,
    Heartbeat,
    Leaving,
    Submit,
    WeightsLoaded,
    pack_ids,
)
from polyrl_rollout.testing.stage import Stage, sent


@pytest.fixture(autouse=True)
def what_is_measured_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is tried for being unknown."""
    monkeypatch.setattr(speed, "OPTIMISM", 1.0)


def test_work_goes_out_at_once_and_carries_everything_the_engine_needs() -> None:
    stage = Stage()
    stage.engine("a")
    (assign,) = sent(stage.submit(), Assign)
    assert (assign.sample, assign.attempt, assign.offset, assign.max_new_tokens) == ("0.0", 1, 0, 100)
    assert len(assign.input_ids) == 40


def test_equal_engines_get_equal_shares() -> None:
    stage = Stage()
    for name in "abcd":
        stage.engine(name)
    stage.submit(16)
    assert sorted(map(len, stage.placed().values())) == [4, 4, 4, 4]


def test_a_faster_engine_gets_more() -> None:
    stage = Stage()
    stage.engine("slow", max_running=64)
    stage.engine("fast", max_running=64)
    stage.ledger.state.engines["slow"].step_scale = 0.04
    stage.ledger.state.engines["fast"].step_scale = 0.02
    stage.submit(60)
    shares = {name: len(samples) for name, samples in stage.placed().items()}
    assert shares["fast"] > shares["slow"]


def idle_for(seconds: float) -> Stage:
    """An engine that was ten times slower, and has been idle since; another one that runs two samples."""
    stage = Stage()
    for name in ("fast", "slow"):
        stage.engine(name)
    stage.submit(2)
    engines = stage.ledger.state.engines
    for name, step_s in (("fast", 0.02), ("slow", 0.2)):
        (number,) = engines[name].running
        stage.tokens(name, number, [5, 2], "stop")
        engines[name].step_scale = step_s
    stage.pass_time_heard(seconds - 1)
    stage.submit(2)
    assert len(stage.placed()["fast"]) == 2
    stage.pass_time_heard(1)
    return stage


def test_one_fresh_sample_tries_an_engine_whose_measurement_is_old() -> None:
    stage = idle_for(speed.STALE_S)
    stage.submit(4)
    assert stage.placed() == {"fast": ["2.0", "3.0", "5.0", "6.0", "7.0"], "slow": ["4.0"]}
    stage.pass_time_heard(1.5)
    assert stage.placed()["slow"] == ["4.0"], "it is not taken away before it has sent anything"


def test_a_measurement_is_believed_for_a_while() -> None:
    stage = idle_for(speed.STALE_S - 1)
    stage.submit(4)
    assert not stage.placed()["slow"]


@pytest.mark.parametrize(
    ("step_s", "more"), [pytest.param(0.02, True, id="faster now"), pytest.param(0.2, False, id="as slow as before")]
)
def test_what_the_trial_measures_replaces_what_was_known(step_s: float, more: bool) -> None:
    stage = idle_for(speed.STALE_S)
    stage.submit()
    number = stage.number("4.0")
    for _ in range(8):
        stage.now += 0.2
        stage.tokens("slow", number, [5] * round(0.2 / step_s))
    stage.submit(6)
    assert (len(stage.placed()["slow"]) > 2) is more
    assert speed.pace_of(stage.ledger.state.engines["slow"], 1.0).step(1) == pytest.approx(step_s, rel=0.1)


@pytest.mark.parametrize("begun", ["moved", "later turn"])
def test_what_was_begun_elsewhere_tries_nobody(begun: str) -> None:
    stage = idle_for(speed.STALE_S)
    stage.ledger.state.engines["slow"].quarantined_until = stage.now + 1
    stage.submit()
    number = stage.number("4.0")
    stage.ledger.state.engines["slow"].quarantined_until = stage.now
    if begun == "moved":
        stage.engine("other")
        stage.agent("fast", HandBack(number, "engineError"))
    else:
        stage.tokens("fast", number, [5, 2], "stop")
        stage.extend("4.0", [7])
    assert not stage.placed()["slow"]


def test_siblings_gather_where_their_long_prompt_is_read() -> None:
    stage = Stage()
    for name in "ab":
        stage.engine(name, max_context=100_000)
    stage.submit(1, n=4, prompt_ids=bytes(4 * 20_000))
    assert sorted(map(len, stage.placed().values())) == [0, 4]


def test_credit_kv_and_order() -> None:
    stage = Stage()
    stage.engine("a", max_running=2)
    stage.submit(3)
    stage.submit(1, priority=5)
    assert stage.placed()["a"] == ["0.0", "1.0"]
    outcome = stage.tokens("a", stage.number("0.0"), [2], "stop")
    assert [assign.sample for assign in sent(outcome, Assign)] == ["3.0"]


def test_groups_of_several_version_ranges_share_an_engines_slots() -> None:
    stage = Stage()
    stage.engine("fast", max_running=2)
    stage.engine("slow", max_running=64)
    stage.ledger.state.engines["fast"].step_scale = 0.01
    stage.ledger.state.engines["slow"].step_scale = 1.0
    groups = tuple(
        Group(
            number,
            0,
            purpose=Purpose.TRAIN,
            prompt_ids=pack_ids([9]),
            n=1,
            sampling=SamplingParams(100),
            min_version=0,
            max_version=number % 2,
        )
        for number in range(4)
    )
    stage.trainer(Submit(stage.request(), groups))
    assert stage.placed() == {"fast": ["0.0", "1.0"], "slow": ["2.0", "3.0"]}


@pytest.mark.parametrize("most", [1, 10, 25, 10_000])
def test_a_large_step_is_placed_in_slices_that_leave_time_for_others(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "PLACED_AT_ONCE", most)
    stage = Stage()
    for name in "abcd":
        stage.engine(name)
    stage.submit(12, n=2)
    slices = 1
    while stage.ledger.state.queue:
        assert stage.ledger.next_due() == stage.now, "the next slice is due at once"
        waiting = len(stage.ledger.state.queue)
        stage.pass_time(0.0)
        assert len(stage.ledger.state.queue) < waiting
        slices += 1
    assert sorted(map(len, stage.placed().values())) == [6, 6, 6, 6]
    assert slices >= 24 / (most + 1)
    assert (stage.ledger.next_due() or 0.0) > stage.now


@pytest.mark.parametrize("seed", range(20))
def test_the_least_cost_wins_for_every_sample(seed: int) -> None:
    """Each sample of a step in turn, against the formula of the module's docstring worked out engine by engine."""
    draw = random.Random(seed)
    stage = Stage()
    state = stage.ledger.state
    for index in range(draw.randint(2, 6)):
        stage.engine(f"e{index}", max_running=draw.randint(1, 6), kv_tokens=draw.randint(300, 3000))
        state.engines[f"e{index}"].step_scale = draw.choice((0.0, 0.02, 0.02, 0.05))
    fleet = speed.mean_step(state.engines.values())
    running = dict.fromkeys(state.engines, 0)
    kv = dict.fromkeys(state.engines, 0)
    siblings: dict[str, set[str]] = {}
    for assign in sent(stage.submit(6, n=3), Assign):
        known = siblings.setdefault(assign.sample.split(".")[0], set())

        def cost(name: str, known: set[str] = known) -> tuple[float, float]:
            engine = state.engines[name]
            its = speed.pace_of(engine, fleet)
            seconds = 100 * its.step(running[name] + 1)
            read = its.read(0 if name in known else 2 * 10)
            return seconds + read, running[name] / engine.capacity.max_running

        open_ones = [
            name
            for name, engine in state.engines.items()
            if running[name] < engine.capacity.max_running
            and (not running[name] or kv[name] + 110 <= engine.capacity.kv_tokens)
        ]
        chosen = min(open_ones, key=cost)
        assert state.assignments[assign.assignment].engine == chosen
        running[chosen] += 1
        kv[chosen] += 110
        known.add(chosen)
    assert len(state.assignments) == sum(running.values())


def test_kv_room_is_set_aside_but_an_empty_engine_takes_anything() -> None:
    stage = Stage()
    stage.engine("a", kv_tokens=150)
    stage.submit(2)
    assert stage.placed()["a"] == ["0.0"]
    stage.engine("b", kv_tokens=50)
    assert stage.placed()["b"] == ["1.0"]


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        pytest.param(-1, False, id="none"),
        pytest.param(0, False, id="too old"),
        pytest.param(1, True, id="the oldest"),
        pytest.param(2, True, id="the newest"),
        pytest.param(3, False, id="too new"),
    ],
)
def test_only_verified_fitting_versions_generate(served: int, expected: bool) -> None:
    stage = Stage()
    stage.publish(3)
    stage.engine("other", version=0)
    stage.engine("a", version=served)
    stage.submit(min_version=1, max_version=2)
    assert bool(stage.placed()["a"]) is expected


def test_a_sample_that_no_version_can_serve_any_more_is_stale() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(1, n=2)
    stage.publish(1)
    assert not sent(stage.pass_time(0.1), GroupDropped)
    dropped = sent(stage.agent("a", WeightsLoaded(1, 0.1, load_seconds=0.1, bytes_pulled=1)), GroupDropped)
    assert [notice.reason for notice in dropped] == [DiscardReason.STALE]


def all_but_one_at_version_1(pool: Pool = Pool.SPOT, **rests: bool) -> Stage:
    """A sample of version 0 at most runs on `a`, which has yet to load version 1, and `r` serves nothing."""
    stage = Stage()
    stage.engine("r", pool, -1, **rests)
    stage.engine("a")
    stage.submit(1, n=2)
    stage.now = 1.0
    stage.publish(1)
    return stage


def loads_version_1(stage: Stage) -> list[DiscardReason]:
    """Reasons for which groups are dropped once `a` has loaded it."""
    outcome = stage.agent("a", WeightsLoaded(1, 0.1, load_seconds=0.1, bytes_pulled=1))
    return [notice.reason for notice in sent(outcome, GroupDropped)]


def test_who_was_there_before_the_newest_version_may_still_load_an_older_one() -> None:
    stage = all_but_one_at_version_1()
    assert not loads_version_1(stage)
    dropped = sent(stage.agent("r", WeightsLoaded(1, 0.1, load_seconds=0.1, bytes_pulled=1)), GroupDropped)
    assert [notice.reason for notice in dropped] == [DiscardReason.STALE]


def test_who_sleeps_will_load_no_older_version() -> None:
    """One that slept while the trainer waited for this very group kept it waiting to its deadline."""
    stage = all_but_one_at_version_1(Pool.RESERVED, sleeps=True, asleep=True)
    assert loads_version_1(stage) == [DiscardReason.STALE]


def test_who_starts_after_the_newest_version_will_load_no_older_one() -> None:
    """In a fleet of flapping engines there is always one that starts."""
    stage = all_but_one_at_version_1()
    stage.agent("r", Deregister("bye"))
    stage.now = 1.5
    stage.engine("b", version=-1)
    assert loads_version_1(stage) == [DiscardReason.STALE]


@pytest.mark.parametrize("last_word", [Deregister("bye"), Leaving(9.0, "notice")], ids=["gone", "drains"])
def test_it_is_looked_at_again_when_the_last_that_may_has_left(last_word: Deregister | Leaving) -> None:
    """Versions and contexts of the fleet are then as before."""
    stage = all_but_one_at_version_1()
    stage.now = 1.5
    stage.engine("b", version=-1)
    assert not loads_version_1(stage)
    dropped = sent(stage.ledger.from_agent("r", last_word, stage.now), GroupDropped)
    assert [notice.reason for notice in dropped] == [DiscardReason.STALE]


def test_a_prompt_longer_than_every_context_is_discarded_with_the_numbers() -> None:
    stage = Stage()
    stage.engine("a", max_context=10)
    (dropped,) = sent(stage.submit(), GroupDropped)
    assert dropped.reason is DiscardReason.PROMPT_TOO_LONG
    assert "10 tokens; engines hold 10" in dropped.detail


def test_an_engine_that_failed_pauses_then_proves_itself_with_one_sample() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(3)
    stage.agent("a", HandBack(1, "engineError"))
    assert len(stage.placed()["a"]) == 2
    stage.pass_time(1.1)
    assert len(stage.placed()["a"]) == 2
    stage.tokens("a", 2, [5])
    stage.tokens("a", 2, [2], "stop")
    assert len(stage.placed()["a"]) == 2


def test_the_engine_that_failed_a_sample_gets_it_only_when_alone() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.engine("b", max_running=1)
    stage.agent("a", HandBack(1, "rejected"))
    assert stage.placed() == {"a": [], "b": ["0.0"]}


def test_speed_is_measured_from_tokens() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(2)
    for _ in range(12):
        stage.now += 0.1
        stage.tokens("a", 1, [5] * 4)
        stage.tokens("a", 2, [5] * 4)
    measured = stage.ledger.state.engines["a"]
    assert measured.tokens_per_s == pytest.approx(80, rel=0.1)
    assert speed.pace_of(measured, 1.0).step(2) == pytest.approx(0.025, rel=0.1)


@pytest.mark.parametrize(
    ("backlog", "asked_for", "expected"),
    [
        pytest.param(100, [], None, id="the trainer keeps up"),
        pytest.param(101, [], {4}, id="the oldest step that lives goes on"),
        pytest.param(101, [7], {4, 7}, id="and what the trainer waits for"),
    ],
)
def test_steps_that_may_begin(backlog: int, asked_for: list[int], expected: set[int] | None) -> None:
    stage = Stage(LedgerConfig(run_epoch=1, backlog_tokens=100))
    for step in (4, 5, 7):
        stage.submit(1, step=step)
    for step in asked_for:
        stage.ask(step=step)
    stage.ledger.state.backlog = backlog
    assert placement.steps_wanted(stage.ledger.state) == expected


def grown(tokens: int, report: int | None) -> Stage:
    """An engine of 1,000 KV tokens runs a sample of 10 + 90 expected tokens, which has come to `tokens`; `report`: what
    the engine then reports as free."""
    stage = Stage()
    stage.engine("a", kv_tokens=1000)
    stage.submit(max_new_tokens=800)
    state = stage.ledger.state
    assignment = state.assignments[1]
    state.engines["a"].kv -= assignment.kv - 100
    state.engines["a"].kv_growth -= assignment.kv - 100
    assignment.kv, assignment.kv_end = 100, 90
    stage.tokens("a", 1, [5] * tokens)
    if report is not None:
        stage.agent("a", Heartbeat(1, 0, kv_free_tokens=report))
    return stage


@pytest.mark.parametrize(
    ("tokens", "report", "room"),
    [
        pytest.param(50, None, 900, id="as expected"),
        pytest.param(90, None, 900, id="all that was expected"),
        pytest.param(100, None, 634, id="beyond it more is set aside"),
        pytest.param(790, None, 190, id="never more than its budget"),
        pytest.param(50, 940, 900, id="a report that agrees"),
        pytest.param(50, 300, 260, id="it reports less: others use its memory"),
        pytest.param(50, 1000, 960, id="it reports more: samples share what they have read"),
    ],
)
def test_kv_room_follows_what_comes_and_what_is_reported(tokens: int, report: int | None, room: int) -> None:
    stage = grown(tokens, report)
    assert cost.kv_room(stage.ledger.state.engines["a"], stage.now) == room


def filled(*lengths: int, budget: int = 100, room: int = 1000) -> Stage:
    """An engine of so much KV room runs samples with prompts of these lengths, none of which has a token."""
    stage = Stage()
    stage.engine("a", kv_tokens=room, max_running=64)
    for length in lengths:
        stage.submit(prompt_ids=pack_ids([9] * length), max_new_tokens=budget)
    return stage


@pytest.mark.parametrize(
    ("newest", "had", "room"),
    [
        pytest.param(2, 400, 400, id="all had come"),
        pytest.param(1, 300, 400, id="one had"),
        pytest.param(0, 0, 400, id="none had"),
        pytest.param(-1, 100, 700, id="it does not say"),
    ],
)
def test_a_report_says_nothing_of_what_had_not_come_when_it_left(newest: int, had: int, room: int) -> None:
    """Prompts that crossed it were forgotten until the next one: 69,300 of 40,000 tokens were given to an engine."""
    stage = filled(300, 100)
    stage.agent("a", Heartbeat(0, 0, kv_free_tokens=1000 - had, newest=newest))
    assert cost.kv_room(stage.ledger.state.engines["a"], stage.now) == room


def test_what_ends_after_a_report_leaves_no_more_room_than_it_had() -> None:
    stage = filled(300, 100)
    stage.agent("a", Heartbeat(2, 0, kv_free_tokens=600, newest=2))
    stage.tokens("a", 1, [5] * 10)
    stage.tokens("a", 1, [5, 2], "stop")
    assert cost.kv_room(stage.ledger.state.engines["a"], stage.now) == 1000 - 200


def test_room_that_is_set_aside_for_a_move_is_nobody_elses_whatever_is_reported() -> None:
    stage = filled(300)
    stage.agent("a", Heartbeat(1, 0, kv_free_tokens=700, newest=1))
    stage.ledger.state.engines["a"].reserved_kv[99] = 150
    assert cost.kv_room(stage.ledger.state.engines["a"], stage.now) == 700 - 100 - 150


def test_an_old_report_is_not_believed() -> None:
    stage = grown(50, 300)
    assert cost.kv_room(stage.ledger.state.engines["a"], stage.now + cost.KV_REPORT_S + 1) == 900


def test_a_full_kv_cache_gets_nothing_more() -> None:
    """2,000 samples of 40 tokens each, of which nobody knew how long they would be, never use more than there is."""
    stage = Stage()
    stage.engine("a", kv_tokens=2000, max_running=64)
    stage.submit(16, max_new_tokens=10)
    for number in tuple(stage.ledger.state.assignments):
        stage.tokens("a", number, [5, 2], "stop")  # turns are taken for short
    stage.submit(60, max_new_tokens=200)
    for _ in range(19):
        for number in tuple(stage.ledger.state.assignments):
            stage.tokens("a", number, [5] * 10)
        used = sum(10 + a.length for a in stage.ledger.state.assignments.values())
        engine = stage.ledger.state.engines["a"]
        assert engine.kv - engine.kv_growth == used
        assert engine.kv >= used
    before = len(stage.ledger.state.assignments)
    stage.submit(10, max_new_tokens=200)
    assert len(stage.ledger.state.assignments) == before or cost.kv_room(engine, stage.now) >= 0


def test_a_long_queue_that_fits_nowhere_is_tried_at_its_head_and_now_and_then_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    honest = placement._Group.place
    monkeypatch.setattr(placement._Group, "place", lambda group: (tried.append(1), honest(group)))
    stage = Stage()
    stage.engine("a", kv_tokens=1_000, max_context=1_000_000, max_running=64)
    stage.submit(1)
    stage.submit(placement.TRIED_GROUPS + 50, prompt_ids=pack_ids([9] * 2_000))

    def tries() -> int:
        tried.clear()
        stage.now += 0.01
        stage.ledger.tick(stage.now)
        return len(tried)

    counts = [tries() for _ in range(90)]
    assert set(counts) == {placement.HEAD_GROUPS, placement.TRIED_GROUPS}
    assert counts.count(placement.TRIED_GROUPS) in (3, 4), "within 0.9 s, once per 0.25 s"


def fast_and_full(stage: Stage, count: int, **fields: int) -> None:
    """So many engines, faster than any other, of which each has free slots and no KV room left for 2,000 tokens."""
    for number in range(count):
        stage.engine(f"fast-{number}", max_running=4, kv_tokens=1_000, max_context=100_000, **fields)
        stage.ledger.state.engines[f"fast-{number}"].step_scale = 0.01


def wait(stage: Stage, times: int) -> None:
    """So often what waits is tried again, each time when it is due."""
    for _ in range(times):
        stage.now += placement.ASK_AGAIN_S
        stage.ledger.tick(stage.now)


@pytest.mark.parametrize(
    "ahead",
    [
        {"purpose": Purpose.EVAL, "min_version": 1, "max_version": 1},
        {"prompt_ids": pack_ids([9] * 5000)},
    ],
    ids=["of a version that nobody serves yet", "too long for who has room"],
)
def test_what_fits_nowhere_holds_nobody_up_however_much_it_is(ahead: dict[str, Any]) -> None:
    """An evaluation of 1,319 prompts with the next weights idled a whole fleet until it had loaded them."""
    stage = Stage()
    stage.engine("long", max_running=1, max_context=10_000)
    stage.submit(prompt_ids=pack_ids([9] * 5000))
    for name in "abcd":
        stage.engine(name)
    stage.publish(1)
    stage.submit(count=600, **ahead)
    stage.submit(count=32, step=1, min_version=0, max_version=1)
    stage.pass_time_heard(2)
    assert [len(stage.placed()[name]) for name in "abcd"] == [8, 8, 8, 8]


@pytest.mark.parametrize("count", [10, 2 * placement.ASKED], ids=["among a few", "among many"])
def test_the_one_engine_that_has_kv_room_is_found_however_slow_it_is(count: int) -> None:
    stage = Stage()
    fast_and_full(stage, count)
    stage.submit(count)
    stage.engine("roomy", max_running=4, kv_tokens=100_000, max_context=100_000)
    stage.ledger.state.engines["roomy"].step_scale = 1.0
    stage.submit(2)  # it is not found for being idle
    stage.submit(1, prompt_ids=pack_ids([9] * 2_000))
    wait(stage, 2 * count // placement.ASKED + 1)
    assert f"{count + 2}.0" in stage.placed()["roomy"]


def test_the_one_engine_that_serves_a_version_is_found_however_slow_it_is() -> None:
    stage = Stage()
    stage.publish(1)
    fast_and_full(stage, 2 * placement.ASKED)
    stage.engine("newest", version=1, max_running=4)
    stage.ledger.state.engines["newest"].step_scale = 1.0
    stage.submit(1, min_version=1, max_version=1)
    wait(stage, 5)
    assert stage.placed()["newest"] == ["0.0"]


def test_a_silent_engine_makes_no_look_at_the_queue_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    honest = placement._Group.place
    monkeypatch.setattr(placement._Group, "place", lambda group: (tried.append(1), honest(group)))
    stage = Stage()
    stage.engine("silent", max_running=1)
    stage.submit(1, prompt_ids=pack_ids([9] * 2_000))
    stage.pass_time(2.0)
    stage.engine("a", kv_tokens=1_000, max_context=1_000_000, max_running=64)
    stage.submit(1)
    stage.submit(placement.TRIED_GROUPS + 50, prompt_ids=pack_ids([9] * 2_000))
    stage.pass_time(1.5)
    assert stage.ledger.state.engines["silent"].silent
    counts = []
    for _ in range(5):
        tried.clear()
        stage.now += 0.01
        stage.ledger.tick(stage.now)
        counts.append(len(tried))
    assert stage.placed()["silent"] == ["0.0"]
    assert min(counts) == placement.HEAD_GROUPS


@pytest.mark.parametrize("refused", [1, placement.ASKS_AT_ONCE + 1, placement.TRIED_GROUPS + 50])
def test_what_all_engines_refuse_holds_up_nobody_and_is_asked_for_again_in_time(refused: int) -> None:
    stage = Stage()
    stage.submit(refused)
    for sample in stage.ledger.state.samples.values():
        sample.rejected_by, sample.rejections, sample.refused_at, sample.moved_at = ["a", "b"], 5, 0.0, 0.0
    sample.rejections = 2
    stage.submit(1)
    for name in "ab":
        stage.engine(name, max_running=1024, kv_tokens=10**9)
    stage.pass_time_heard(1.0)
    assert [assignment.sample for assignment in stage.ledger.state.assignments.values()] == [f"{refused}.0"]
    assert stage.ledger.next_due() == 2.0, "the last one may come again first"
    stage.pass_time_heard(16.0)
    assert stage.number("0.0")


@pytest.mark.parametrize("refused", [placement.ASKS_AT_ONCE + 1, placement.TRIED_GROUPS + 50])
@pytest.mark.parametrize("why", ["it pauses", "the trainer learns", "its context is too short"])
def test_what_others_refuse_holds_up_nobody_while_the_last_engine_may_not_be_given_it(why: str, refused: int) -> None:
    """129 groups kept two idle engines from what waits behind for as long as that lasted."""
    stage = Stage()
    for name in "ab":
        stage.engine(name, max_running=1)
    pool = Pool.RESERVED if why == "the trainer learns" else Pool.SPOT
    stage.engine("last", pool, max_context=5 if why == "its context is too short" else 4096)
    stage.submit(1)
    stage.finish_all()
    stage.ask(most=1)
    if why == "it pauses":
        stage.ledger.state.engines["last"].quarantined_until = 60.0
    stage.submit(2)
    stage.submit(refused)
    waiting = [sample for sample in stage.ledger.state.samples.values() if sample.phase is SamplePhase.WAITING]
    for sample in waiting:
        sample.rejected_by, sample.rejections, sample.refused_at, sample.moved_at = ["a", "b"], 9, 0.0, 0.0
    assert len(waiting) == refused
    stage.submit(1)
    (number,) = stage.ledger.state.engines["a"].running
    stage.tokens("a", number, [2], "stop")
    stage.pass_time_heard(1.0)
    assert stage.placed()["a"] == [f"{refused + 3}.0"]
    assert stage.placed()["last"] == []
    if why == "it pauses":
        stage.pass_time_heard(60.0)
        assert stage.placed()["last"], "once it may"


def test_what_another_engine_may_still_take_is_not_passed_by() -> None:
    stage = Stage()
    stage.submit(placement.HEAD_GROUPS + 10)
    for sample in stage.ledger.state.samples.values():
        sample.rejected_by, sample.rejections, sample.refused_at, sample.moved_at = ["a", "b"], 5, 0.0, 0.0
        if sample.group < placement.HEAD_GROUPS + 8:
            sample.rejected_by = ["a", "b", "c"]
    for name in "abc":
        stage.engine(name)
    stage.pass_time_heard(1.0)
    assert sorted(stage.placed()["c"]) == [f"{placement.HEAD_GROUPS + 8}.0", f"{placement.HEAD_GROUPS + 9}.0"]


def test_what_an_engine_will_not_hold_is_read_again_on_a_longer_one() -> None:
    stage = Stage()
    for name, context, step_s in (("short", 1050, 0.02), ("wide", 4096, 0.021)):
        stage.engine(name, max_context=context)
        engine = stage.ledger.state.engines[name]
        engine.step_scale, engine.half_batch, engine.token_at = step_s, 64.0, stage.now
    stage.submit(prompt_ids=pack_ids([9] * 1000))
    assert stage.placed() == {"short": [], "wide": ["0.0"]}


def test_what_an_engine_has_accepted_and_does_not_run_is_waited_for() -> None:
    stage = Stage()
    for name in "ab":
        stage.engine(name)
    stage.agent("a", Heartbeat(0, 4, kv_free_tokens=100_000))
    stage.submit()
    assert stage.placed() == {"a": [], "b": ["0.0"]}
