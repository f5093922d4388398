"""What each policy is worth, as ratios of virtual seconds or tokens; the ledger must find the engines' true speeds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from polyrl.ledger import LedgerConfig, fleet, ledger, speed
from polyrl.ledger.journal import encode_state
from polyrl.ledger.messages import agents
from polyrl.ledger.scheduling import placement, rebalance
from polyrl.ledger.state import LeasedEngine, assign_message
from polyrl.sample import Pool, Purpose, sample_id
from polyrl.wire import Heartbeat, HeldAssignment, Hello, pack_ids
from polyrl_rollout.testing.flow import Flow, Speed
from polyrl_rollout.testing.stage import Stage

Patch = pytest.MonkeyPatch
FAST = Speed(0.02)


def drawn(seed: int, median: int = 400, sigma: float = 0.8, most: int = 4000) -> Callable[[str, int], int]:
    """Log-normal lengths, the same for the same sample."""

    def length(sample: str, turn: int) -> int:
        return 2 + min(most - 2, int(median * Random(f"{seed}/{sample}/{turn}").lognormvariate(0, sigma)))

    return length


def step_of(engines: dict[str, Speed], seed: int, **submitted: Any) -> Flow:
    flow = Flow(engines, drawn(seed))
    flow.submit(**({"count": 12, "n": 4, "max_new_tokens": 4000} | submitted))
    return flow


def nobody_is_tried(patch: Patch) -> None:
    """An engine of which nothing is known is taken for average."""
    patch.setattr(speed, "OPTIMISM", 1.0)


def without_rebalancing(patch: Patch) -> None:
    patch.setattr(ledger, "rebalance", lambda transition, room: None)


def four(slow: float = 0.02) -> dict[str, Speed]:
    return {"a": Speed(slow), "b": FAST, "c": FAST, "d": FAST}


# --- speeds are measured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param(Speed(0.02), id="as usual"),
        pytest.param(Speed(0.05, 16.0), id="slow and soon full"),
        pytest.param(Speed(0.01, 200.0), id="fast and wide"),
    ],
)
def test_steps_and_their_growth_with_the_batch_are_measured(truth: Speed) -> None:
    flow = step_of({"a": truth}, 1)
    flow.run()
    its = speed.pace_of(flow.ledger.state.engines["a"], 1.0)
    for batch in (4, 16):
        assert its.step(batch) == pytest.approx(truth.step_s * (1 + batch / truth.half_batch), rel=0.15)


def test_reading_is_measured_from_first_tokens_whoever_queues_before() -> None:
    flow = Flow({"a": Speed(0.02, prefill_s=0.001)}, drawn(1, 100))
    flow.submit(12, prompt_ids=bytes(4 * 4000), max_new_tokens=400)
    flow.run()
    assert flow.ledger.state.engines["a"].prefill_s == pytest.approx(0.001, rel=0.3)


def test_a_pause_between_two_steps_is_not_slowness() -> None:
    flow = step_of({"a": FAST}, 1)
    flow.run()
    measured = flow.ledger.state.engines["a"].step_scale
    for _ in range(600):
        flow.step()
    flow.submit(8, max_new_tokens=4000)
    flow.run(flow.now + 3.0)
    assert flow.ledger.state.engines["a"].step_scale == pytest.approx(measured, rel=0.2)


# --- rebalancing ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_engine_ten_times_slower_does_not_hold_the_step(seed: int, monkeypatch: Patch) -> None:
    balanced, without_it = step_of(four(0.2), seed).run(), step_of({"b": FAST, "c": FAST, "d": FAST}, seed).run()
    without_rebalancing(monkeypatch)
    left_alone = step_of(four(0.2), seed).run()
    assert left_alone / balanced > 3
    assert balanced / without_it < 1.35


@pytest.mark.parametrize(
    ("heals", "least", "most"),
    [pytest.param(True, 0.3, 0.7, id="it heals"), pytest.param(False, 0.0, 0.2, id="it stays slow")],
)
def test_an_engine_that_has_recovered_gets_work_again(heals: bool, least: float, most: float) -> None:
    flow = Flow({"a": FAST, "b": Speed(0.2)}, drawn(3))
    tokens: list[int] = []
    for step in range(4):
        flow.submit(8, n=2, step=step, max_new_tokens=4000)
        flow.run()
        tokens.append(flow.ledger.state.engines["b"].tokens)
        if heals:
            flow.engines["b"].speed = FAST
        idle_until = flow.now + 40.0
        while flow.now < idle_until:
            flow.step()
    share = (tokens[3] - tokens[2]) / (flow.ledger.state.counters.tokens_accepted / 4)
    print(f"the engine generates {share:.2f} of the last step")
    assert least <= share <= most


@pytest.mark.parametrize("seed", range(3))
def test_engines_that_come_late_take_over_what_runs(seed: int, monkeypatch: Patch) -> None:
    def run() -> float:
        flow = step_of({"a": Speed(0.02, 16.0, max_running=48)}, seed)
        flow.run(10.0)
        flow.join("b", FAST)
        flow.join("c", FAST)
        return flow.run()

    balanced = run()
    without_rebalancing(monkeypatch)
    assert run() / balanced > 1.25


@pytest.mark.parametrize(
    ("others", "on_b", "winner"),
    [
        pytest.param(Speed(0.02, 4.0), 0, "b", id="spreads to an idle one"),
        pytest.param(Speed(0.01), 2, "b", id="gathers on a busy faster one"),
        pytest.param(Speed(0.02), 2, "a", id="stays where a move would not end it sooner"),
    ],
)
def test_the_tail_gathers_or_spreads_whichever_ends_sooner(
    others: Speed, on_b: int, winner: str, monkeypatch: Patch
) -> None:
    nobody_is_tried(monkeypatch)

    def run() -> tuple[float, Flow]:
        flow = Flow({"a": Speed(0.02 if winner == "a" else 0.05, 4.0 if on_b == 0 else 64.0)}, lambda s, t: 1000)
        flow.submit(4, max_new_tokens=1000)
        flow.run(4.0)
        flow.join("b", others)
        flow.ledger.state.engines["b"].step_scale = others.step_s
        flow.ledger.state.engines["b"].half_batch = others.half_batch
        if on_b:
            flow.submit(on_b, max_new_tokens=300)
        return flow.run(), flow

    ended, flow = run()
    moved = flow.ledger.state.counters.migrations.get("rebalanced", 0)
    without_rebalancing(monkeypatch)
    apart, _ = run()
    print(f"to {winner}: {moved} moves, {apart / ended:.2f}")
    if winner == "b":
        assert moved
        assert apart / ended > 1.2
    else:
        assert not moved


@pytest.mark.parametrize("seed", range(2))
def test_pauses_between_looks_cost_a_step_nothing(seed: int, monkeypatch: Patch) -> None:
    def run(most: int) -> float:
        monkeypatch.setattr(rebalance, "SCANNED_AT_ONCE", most)
        return step_of(four(0.2), seed).run()

    assert run(0) / run(1 << 30) < 1.1


@pytest.mark.slow
def test_what_looking_costs_on_a_large_fleet_is_bounded(monkeypatch: Patch) -> None:
    """Found by the benchmark of 256 engines: each end of a sample looked at hundreds that no move would help, and the
    manager stood still."""
    scanned: list[int] = []
    movable = rebalance._movable

    def counted(*given: Any) -> list[Any]:
        found = movable(*given)
        scanned.append(len(found))
        return found

    monkeypatch.setattr(rebalance, "_movable", counted)
    monkeypatch.setattr(rebalance, "GAIN_S", 1000.0)
    fleet = {f"{number}": Speed(0.1 if number < 8 else 0.02, max_running=32) for number in range(32)}
    seconds = step_of(fleet, 1, count=128, n=8).run()
    large = [seen for seen in scanned if seen > rebalance.SCANNED_AT_ONCE]
    print(f"{len(large)} large scans of {len(scanned)} in {seconds:.0f} s")
    assert 4 < len(large) <= seconds / rebalance.SCAN_PAUSE_S + 1
    assert len(scanned) > 1.5 * len(large), "small ones go on"


def test_a_move_that_would_put_the_steps_end_off_is_not_made(monkeypatch: Patch) -> None:
    nobody_is_tried(monkeypatch)
    flow = Flow({"fast": Speed(0.02, 4.0)}, lambda sample, turn: 300 if sample == "2.0" else 3000)
    flow.submit(2, max_new_tokens=3000)
    flow.run(4.0)
    flow.join("slow", Speed(0.06))
    fast, slow = flow.ledger.state.engines.values()
    fast.step_scale, fast.half_batch, slow.step_scale = 0.02, 4.0, 0.027  # until measured
    flow.submit(1, max_new_tokens=300)
    assert flow.placed()["slow"] == ["2.0"]
    flow.run()
    assert not flow.ledger.state.counters.migrations
    assert max(flow.ended, key=flow.ended.__getitem__) != "2.0"


# --- engines that fail without a word ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "lost_s"),
    [("frozen", 3.0), ("mute", 3.0), ("stuck", 30.0), ("deaf", 30.0)],
    ids=["frozen", "mute", "stuck", "deaf"],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_silent_engine_costs_its_deadline_and_what_must_be_read_again(fault: str, lost_s: float, seed: int) -> None:
    """SIGSTOP of a machine or of an engine alone; one direction of the network gone. For good."""
    undisturbed = step_of(four(), seed).run()
    flow = step_of(four(), seed)
    flow.run(5.0)
    setattr(flow.engines["b"], fault, True)
    assert flow.run() < 4 / 3 * undisturbed + lost_s + 8
    alive = flow.ledger.state.engines
    assert "b" not in alive or alive["b"].failures or not alive["b"].running


@pytest.mark.parametrize("silent_s", [5.0, 20.0], ids=["silent", "gone"])
def test_what_an_engine_generated_while_nobody_heard_it_is_taken_back(silent_s: float, monkeypatch: Patch) -> None:
    def generated_twice() -> int:
        """What two engines made of the same, while one of them was not heard, is lost in either case."""
        flow = step_of(four(), 1)
        flow.run(5.0)
        flow.engines["b"].mute = True
        flow.run(5.0 + silent_s)
        assert flow.ledger.state.counters.migrations["lost"] > 4
        flow.engines["b"].mute = False
        flow.run()
        needed = sum(drawn(1)(f"{group}.{index}", 0) for group in range(12) for index in range(4))
        return sum(engine.generated for engine in flow.engines.values()) - needed

    reclaimed = generated_twice()
    monkeypatch.setattr(agents, "_may_reclaim", lambda *_: False)
    print(reclaimed, without := generated_twice())
    assert reclaimed < without - 200


def test_an_engine_that_comes_back_proves_itself_with_one_sample() -> None:
    flow = step_of(four(), 1, count=40)
    flow.engines["b"].frozen = True
    flow.run(16.5)
    assert "b" not in flow.ledger.state.engines
    flow.engines["b"].frozen = False
    while not flow.placed().get("b"):
        flow.step()
    assert len(flow.placed()["b"]) == 1
    flow.run(flow.now + 5.0)
    assert len(flow.placed()["b"]) > 1


@pytest.mark.slow
def test_one_that_flaps_costs_ever_fewer_moves(monkeypatch: Patch) -> None:
    def lost_moves() -> int:
        flow = step_of(four(), 1, count=200)

        def flap(flow: Flow) -> None:
            flow.engines["b"].mute = flow.now % 6 < 4

        flow.run(100.0, flap)
        return flow.ledger.state.counters.migrations["lost"]

    half_open = lost_moves()
    monkeypatch.setattr(agents, "half_open", lambda d, name: None)
    assert lost_moves() / half_open > 1.2


def test_pauses_of_one_that_flaps_double_until_it_stays() -> None:
    flow = Flow({"a": FAST, "b": FAST}, drawn(1))
    pauses = []
    for _ in range(5):
        flow.engines["b"].mute = True
        while "b" in flow.ledger.state.engines:
            flow.step()
        flow.engines["b"].mute = False
        while "b" not in flow.ledger.state.engines:
            flow.step()
        pauses.append(round(flow.ledger.state.engines["b"].quarantined_until - flow.now))
        flow.now += 20.0
        flow.agent("a", Heartbeat(0, 0, kv_free_tokens=0))
        flow.agent("b", Heartbeat(0, 0, kv_free_tokens=0))
    assert pauses == [0, 1, 2, 4, 8]


# --- prefixes ---------------------------------------------------------------------------------------------------------


def conversation(seed: int) -> Flow:
    flow = Flow(
        {name: Speed(0.02, prefill_s=0.001) for name in "abcd"},
        drawn(seed, 100),
        turns=8,
        environment=8,
        verdict_s=lambda sample, turn: Random(f"{seed}/{sample}/{turn}").uniform(0.0, 5.0),
    )
    flow.submit(60, prompt_ids=bytes(4 * 2000), max_new_tokens=2000)
    return flow


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_later_turn_returns_to_the_engine_that_holds_its_prefix(seed: int, monkeypatch: Patch) -> None:
    flow, other = conversation(seed), conversation(seed)
    seconds = flow.run()
    honest = placement.placement_request
    monkeypatch.setattr(placement, "placement_request", lambda *of: honest(*of)._replace(prefix=""))
    ratio = other.run() / seconds
    read, read_again = (sum(engine.read for engine in f.engines.values()) for f in (flow, other))
    print(f"seconds {ratio:.2f}, tokens read {read_again / read:.2f}")
    assert ratio > 1.2
    assert read_again / read > 1.8


@pytest.mark.parametrize(
    ("context", "waits"), [pytest.param(20_000, True, id="long"), pytest.param(20, False, id="short")]
)
def test_a_later_turn_waits_for_its_prefix_unless_that_costs_more(context: int, waits: bool) -> None:
    flow = Flow({"a": Speed(0.02, prefill_s=0.002, max_running=1)}, drawn(1), turns=2)
    flow.submit(1, max_new_tokens=200, prompt_ids=bytes(4 * context))
    sample = sample_id(0, 0)
    flow.ledger.state.engines["a"].prefill_s, flow.ledger.state.engines["a"].step_scale = 0.002, 0.02
    flow.tokens("a", flow.number(sample), [5] * 99 + [2], "stop")
    flow.submit(1, max_new_tokens=200, min_version=0)
    assert flow.placed()["a"] == [sample_id(1, 0)]
    flow.join("b", Speed(0.02, prefill_s=0.002))
    flow.extend(sample, [7] * 8)
    assert bool(flow.number(sample)) is not waits
    flow.run(flow.now + 60.0)
    assert flow.number(sample) or sample in flow.ended, "it never waits for longer than reading would have taken"


def test_an_engine_knows_where_the_turn_begins() -> None:
    flow = Flow({"a": FAST}, lambda s, t: 3, turns=2)
    flow.submit(1, max_new_tokens=200)
    sample, begins = sample_id(0, 0), []

    def began() -> int:
        return assign_message(flow.ledger.state, flow.number(sample), kept=False).turn_start

    flow.tokens("a", flow.number(sample), [5, 6])
    begins.append(began())
    flow.tokens("a", flow.number(sample), [2], "stop")
    flow.extend(sample, [7] * 8)
    begins.append(began())
    flow.tokens("a", flow.number(sample), [5, 6])
    begins.append(began())
    assert begins == [0, 3 + 8, 3 + 8]


# --- drains -----------------------------------------------------------------------------------------------------------


def test_a_drain_lets_short_ones_finish_and_moves_the_longest_first() -> None:
    flow = Flow({"a": FAST}, lambda s, t: 100 * (1 + int(s.split(".")[0])))
    for index in range(8):
        flow.submit(1, max_new_tokens=100 * (1 + index))
    flow.run(1.0)
    flow.join("b", Speed(0.02, max_running=3))
    flow.ledger.state.samples["6.0"].moved_at = flow.ledger.state.samples["7.0"].moved_at = flow.now
    flow.drain("a", 8.0)
    assert flow.placed().get("b", []) == [], "nobody is placed before all its tokens are here"
    flow.step()
    assert flow.placed()["b"] == ["7.0", "6.0", "5.0"]
    assert len(flow.placed()["a"]) == 5, "who has no room elsewhere goes on here"
    end = flow.run()
    assert end < 800 * 0.02 * 1.3 + 2


def test_who_evaluates_leaves_first(monkeypatch: Patch) -> None:
    nobody_is_tried(monkeypatch)
    flow = Flow({"a": FAST}, lambda s, t: 900)
    flow.submit(2, max_new_tokens=900)
    flow.submit(1, max_new_tokens=800, purpose=Purpose.EVAL)
    flow.run(1.0)
    flow.join("b", Speed(0.02, max_running=1))
    flow.drain("a", 2.0)
    flow.step()
    assert flow.placed()["b"] == ["2.0"]


def test_who_leaves_a_draining_engine_leaves_no_token_behind() -> None:
    flow = Flow({"a": FAST, "b": FAST}, drawn(0), turns=2)
    flow.submit(12, max_new_tokens=4000)
    flow.run(2.0)
    before = set(flow.placed()["a"])
    flow.drain("a", 1.0)
    flow.step()
    assert before & set(flow.placed()["b"])
    flow.run()
    assert flow.ledger.state.counters.tokens_in_vain == 0


def test_what_an_engine_was_asked_for_is_asked_again_when_it_greets_again() -> None:
    flow = Flow({"a": FAST}, lambda s, t: 900)
    flow.submit(1, max_new_tokens=900)
    flow.run(1.0)
    flow.engines["a"].deaf = True
    flow.join("b", FAST)
    flow.drain("a", 9.0)
    flow.step()
    assert flow.placed().get("b", []) == [], "it has not heard"
    flow.engines["a"].deaf = False
    (assign,) = [stream.assign for stream in flow.engines["a"].protocol.book.streams.values()]
    held = (HeldAssignment(assign.assignment, assign.sample, attempt=assign.attempt, length=0),)
    flow.agent(
        "a",
        Hello(
            1,
            "a",
            pool=Pool.SPOT,
            max_running=16,
            kv_tokens=1_000_000,
            max_context=131_072,
            weight_version=0,
            held=held,
        ),
    )
    for _ in range(3):
        flow.step()
    assert flow.placed()["b"] == ["0.0"]


@pytest.mark.parametrize("seed", range(3))
def test_longest_first_ends_sooner_than_shortest_first_and_than_waiting_for_the_deadline(
    seed: int, monkeypatch: Patch
) -> None:
    def run() -> float:
        flow = Flow({"a": Speed(0.02, max_running=24)}, drawn(seed, 300, 1.0, 2000))
        length = drawn(seed, 300, 1.0, 2000)
        for index in range(16):
            flow.submit(1, max_new_tokens=length(sample_id(index, 0), 0))
        flow.run(1.0)
        flow.join("b", Speed(0.02, max_running=4))
        flow.drain("a", 12.0)
        return flow.run(each=lambda f: f.vanish("a") if f.now >= 13.0 and "a" in f.engines else None)

    longest = run()
    honest = rebalance._movable
    monkeypatch.setattr(rebalance, "_movable", lambda d, costs, givers: honest(d, costs, givers)[::-1])
    shortest = run()
    monkeypatch.setattr(rebalance, "_movable", lambda d, costs, givers: [])
    at_the_deadline = run()
    print(f"shortest first {shortest / longest:.3f}, at the deadline {at_the_deadline / longest:.3f}")
    assert shortest >= longest
    assert at_the_deadline > longest


# --- flows ------------------------------------------------------------------------------------------------------------


def test_evaluation_goes_before_training_that_waits() -> None:
    flow = Flow({"a": Speed(0.02, max_running=2)}, drawn(1, 100))
    flow.submit(20, max_new_tokens=400)
    flow.submit(4, max_new_tokens=400, purpose=Purpose.EVAL)
    flow.run()
    last = max(flow.ended[sample_id(number, 0)] for number in range(20, 24))
    assert last / flow.now < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_prompts_up_to_32k_and_responses_up_to_64k_share_a_fleet_with_flat_memory(seed: int) -> None:
    engines = {name: Speed(0.002, kv_tokens=400_000, prefill_s=0.0001, max_running=32) for name in "abcd"}
    flow = Flow(engines, drawn(seed, 1000, 2.0, 65_536))
    sizes = []
    draw = Random(seed)
    for step in range(6):
        for _ in range(12):
            prompt = pack_ids([9] * int(10 * 3200 ** draw.random()))
            flow.submit(1, n=4, step=step, prompt_ids=prompt, max_new_tokens=65_536)
        flow.run()
        for engine in flow.ledger.state.engines.values():
            assert not engine.running
            assert engine.kv == 0
        flow.ask(48, 48, step=step, max_tokens=10**9)
        flow.acknowledge(step)
        sizes.append(len(encode_state(flow.ledger.state)))
        flow.events.clear()
    assert not flow.ledger.state.counters.discarded
    assert flow.ledger.state.counters.acknowledged == 6 * 48
    assert max(sizes) < 64 * 1024, "what has ended is forgotten"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "flat"), [pytest.param(20_000, True, id="bounded"), pytest.param(10**9, False, id="without a bound")]
)
def test_a_slow_trainer_holds_engines_back_and_memory_stays_flat(bound: int, flat: bool) -> None:
    """Twenty steps are submitted at once; one is trained in the time in which engines could generate ten."""
    flow = Flow(four(), lambda sample, turn: 200, LedgerConfig(run_epoch=1, backlog_tokens=bound))
    for step in range(20):
        flow.submit(8, n=4, step=step, max_new_tokens=200)
    largest, tokens_of_a_step = 0, 8 * 4 * 210
    for step in range(20):
        flow.ask(32, 32, step=step, max_tokens=10**9, deadline_s=1000.0)
        flow.run(flow.now + 60.0)
        assert flow.ledger.state.batches
        largest = max(largest, flow.ledger.state.backlog)
        flow.acknowledge(step)
        flow.events.clear()
    assert flow.ledger.state.counters.acknowledged == 20 * 32
    assert flow.ledger.state.backlog == 0
    begun = 2 * 4 * 16 * 210  # what runs, and siblings of it
    assert (largest <= 20_000 + begun + tokens_of_a_step) is flat


def test_the_states_bytes_have_no_place_for_what_has_ended() -> None:
    flow = step_of(four(), 1)
    empty = len(msgspec.msgpack.encode(Flow(four(), drawn(1)).ledger.state))
    flow.run()
    flow.ask(48, 48)
    flow.acknowledge(0)
    assert len(msgspec.msgpack.encode(flow.ledger.state)) < empty + 4096


def test_what_engines_measure_is_put_in_order_as_it_comes_and_not_all_in_one_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    for number in range(20):
        stage.engine(f"e{number}", max_running=1)
    stage.submit(20)
    monkeypatch.setattr(stage, "_current", lambda: stage.ledger)
    stage.pass_time(0.0)
    counted_engines: list[str] = []
    entry = fleet._entry

    def counted(engine: LeasedEngine, mean: float) -> fleet._Entry:
        counted_engines.append(engine.name)
        return entry(engine, mean)

    monkeypatch.setattr(fleet, "_entry", counted)
    for _ in range(3):
        stage.now += 1.1
        for number, assignment in stage.ledger.state.assignments.items():
            stage.tokens(assignment.engine, number, [5])
    assert len(counted_engines) >= 20, "a window that is over may change an engine's place"
    counted_engines.clear()
    stage.pass_time(0.1)
    assert counted_engines == []
