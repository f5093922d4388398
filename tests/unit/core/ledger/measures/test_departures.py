"""Whose tokens are not the policy's: named among honest others, never among two, and never more than a minority."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from polyrl.ledger import LedgerConfig
from polyrl.ledger.events import EngineDeparted, EngineQuarantined
from polyrl.ledger.measures.departures import MAX_PAUSE_S, PAUSE_S, departures
from polyrl.sample import Pool
from polyrl.status import EngineState
from polyrl.wire import Deregister, EngineMeasure, HandBack, HandBackReason, TrainerReport, engine_shares
from polyrl_rollout.testing.stage import Stage, replay, snapshot


def row(engine: str, drift: float = 0.02, surprise: float = 0.0, tokens: int = 2000, cohort: int = 0) -> EngineMeasure:
    return EngineMeasure(engine, cohort, tokens=tokens, drift=drift, surprise=surprise)


HONEST = [row("a", 0.018, 0.05), row("b", 0.022, -0.04), row("c", 0.02, 0.01)]
CASES = {
    "bfloat16 beside float32": ([*HONEST, row("d", 0.0)], []),
    "made-up logprobs": ([*HONEST, row("d", 2.5)], ["d"]),
    "true logprobs of other tokens": ([*HONEST, row("d", surprise=1.5)], ["d"]),
    "always the likeliest token": ([*HONEST, row("d", surprise=-1.0)], ["d"]),
    "a tenth of its tokens": ([*HONEST, row("d", 0.5)], ["d"]),
    "both at once": ([*HONEST, row("d", 2.5, 5.0)], ["d"]),
    "few tokens": ([*HONEST, row("d", 2.5, tokens=63)], []),
    "some chance with 64 tokens": ([*HONEST, row("d", surprise=1.0, tokens=64)], []),
    "all alike far away": ([row(name, 0.6) for name in "abcd"], []),
    "a fleet of wide spread": ([row("a", 0.1), row("b", 0.5), row("c", 0.9), row("d", 1.3)], []),
    "one of two": ([row("a"), row("d", 2.5)], []),
    "alone": ([row("d", 2.5)], []),
    "half of four": ([row("a"), row("b"), row("c", 2.5), row("d", 2.6)], []),
    "other cohort, other learner": ([*HONEST, row("d", 2.5, cohort=1)], []),
    "a late one, outvoted in its cohort": (
        [*HONEST, row("late", 0.5, cohort=1), row("x", cohort=1), row("y", cohort=1)],
        [],
    ),
    "the same engines at two steps": (
        [row(name, 2.5 if name == "d" else 0.02, cohort=step) for step in (0, 1) for name in "abcd"],
        ["d"],
    ),
    "two of five": ([*HONEST, row("d", 2.5), row("e", 9.0)], ["e", "d"]),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("rows", "named"), CASES.values(), ids=CASES)
def test_who_departs(rows: list[EngineMeasure], named: list[str]) -> None:
    assert [one.engine for one in departures(rows)] == named


def test_fewer_than_half_are_ever_named() -> None:
    dice = Random(7)
    for _ in range(2000):
        rows = [row(str(n), dice.choice([0.02, dice.expovariate(1)]), dice.gauss(0, 3)) for n in range(3)]
        rows += [row(str(n), dice.expovariate(0.3), dice.gauss(0, 3)) for n in range(3, dice.randint(3, 9))]
        for measure in ("drift", "surprise"):
            alone = [msgspec.structs.replace(one, **{({"drift", "surprise"} - {measure}).pop(): 0.0}) for one in rows]
            assert len(departures(alone)) < len(rows) / 2


def test_shares_are_of_all_tokens_of_a_step() -> None:
    rows = [row("a", tokens=30), row("a", tokens=30, cohort=1), row("b", tokens=40)]
    assert engine_shares(rows) == {"a": 0.6, "b": 0.4}
    assert engine_shares([]) == {}


def report(stage: Stage, step: int, *rows: EngineMeasure) -> None:
    stage.trainer(TrainerReport(stage.request(), "rl", step=step, values={}, engines=rows))


def fleet(**pools: Pool) -> Stage:
    stage = Stage()
    for name in "abcd":
        stage.engine(name, pool=pools.get(name, Pool.SPOT))
    return stage


def paused_s(stage: Stage, name: str) -> float:
    return stage.ledger.state.engines[name].quarantined_until - stage.now


def test_who_departs_pauses_longer_each_time_also_under_a_new_lease() -> None:
    stage, poison = fleet(), row("d", 2.5)
    for step, pause_s in enumerate([PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]):
        report(stage, step, *HONEST, poison)
        assert paused_s(stage, "d") == pause_s
    stage.agent("d", Deregister("test"))
    stage.engine("d")
    assert paused_s(stage, "d") == MAX_PAUSE_S
    engine = next(one for one in stage.ledger.status(stage.now).engines if one.name == "d")
    assert engine.state is EngineState.SUSPECT
    assert (
        engine.departed
        == "step 4: drift 2.5 nats over 2000 tokens, the fleet's 0.021; 25% of the step's tokens are its own"
    )
    assert any(
        "its tokens are not the policy's (step 4" in wait.sentence(0.0) for wait in stage.ledger.waits(stage.now)
    )
    stage.submit(n=40)
    assert {one.engine for one in stage.ledger.state.assignments.values()} == {"a", "b", "c"}
    assert msgspec.msgpack.encode(replay(LedgerConfig(run_epoch=1), stage.events)) == snapshot(stage.ledger)


def test_a_failure_ends_no_pause_of_one_that_departed() -> None:
    """What it ran it failed after a second, and got work again long before its pause was over."""
    stage = fleet()
    stage.submit(n=40)
    number = next(iter(stage.ledger.state.engines["d"].running))
    report(stage, 1, *HONEST, row("d", 2.5))
    stage.agent("d", HandBack(number, HandBackReason.ENGINE_ERROR))
    assert paused_s(stage, "d") == PAUSE_S


def test_the_trainers_own_engine_is_named_and_never_pauses() -> None:
    stage = fleet(d=Pool.RESERVED)
    report(stage, 1, *HONEST, row("d", 2.5))
    assert [event.engine for event in stage.events if isinstance(event, EngineDeparted)] == ["d"]
    assert paused_s(stage, "d") < 0


def test_nobody_pauses_while_no_other_takes_work() -> None:
    stage = fleet()
    for name in "abc":
        stage.drain(name, 100.0)
    report(stage, 1, *HONEST, row("d", 2.5))
    assert paused_s(stage, "d") < 0


def test_one_that_is_gone_is_named_as_well() -> None:
    stage = fleet()
    stage.agent("d", Deregister("test"))
    report(stage, 1, *HONEST, row("d", 2.5))
    assert stage.ledger.state.usage.departed["d"].times == 1


def test_however_often_it_greets_its_pause_is_written_down_once() -> None:
    """Each greeting was an entry of the history, which is never deleted."""
    stage = fleet()
    report(stage, 1, *HONEST, row("d", 2.5))
    for _ in range(5):
        stage.now += 0.1
        stage.engine("d")
    assert sum(isinstance(event, EngineQuarantined) for event in stage.events) == 1
    assert paused_s(stage, "d") == pytest.approx(PAUSE_S - 0.5)
