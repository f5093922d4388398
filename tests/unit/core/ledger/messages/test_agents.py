"""An agent's greeting, and what it gives back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from polyrl.ledger.events import EngineQuarantined, Moved
from polyrl.sample import DiscardReason, Pool
from polyrl.wire import (
    Assign,
    Cancel,
    Fenced,
    GroupDropped,
    HandBack,
    Heartbeat,
    HeldAssignment,
    Hello,
    Resend,
    StartDrain,
    WeightsLoaded,
    Welcome,
)
from polyrl_rollout.testing.stage import Stage, sent

HELLO = Hello(1, "a", pool=Pool.SPOT, max_running=8, kv_tokens=1000, max_context=4096, weight_version=-1)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        pytest.param({}, Welcome, id="as it should be"),
        pytest.param({"engine": "b"}, Fenced, id="another's name"),
        pytest.param({"run_epoch": 2}, Fenced, id="another epoch"),
        pytest.param({"max_running": 0}, Fenced, id="no slot"),
        pytest.param({"kv_tokens": 0}, Fenced, id="no KV room"),
        pytest.param({"max_context": 0}, Fenced, id="no context"),
    ],
)
def test_who_is_welcome(changes: dict[str, Any], answer: type) -> None:
    stage = Stage()
    outcome = stage.agent("a", msgspec.structs.replace(HELLO, **changes))
    assert [type(message) for message in sent(outcome, (Welcome, Fenced))] == [answer]
    assert bool(stage.ledger.state.engines) is (answer is Welcome)


@pytest.mark.parametrize(
    ("held", "resent", "cancelled", "moved"),
    [
        pytest.param([], [], [Cancel(1)], ["notHeld"], id="it forgot it, or never got it"),
        pytest.param([(1, 3)], [Resend(1, 3)], [], [], id="it has what we have"),
        pytest.param([(1, 9)], [Resend(1, 3)], [], [], id="it has more"),
        pytest.param([(1, 2)], [], [Cancel(1)], ["notHeld"], id="it has fewer, and would draw others"),
        pytest.param([(1, 3), (7, 5)], [Resend(1, 3)], [Cancel(7)], [], id="it holds what is over"),
    ],
)
def test_what_it_holds_when_it_greets_again(
    held: list[tuple[int, int]], resent: list[Resend], cancelled: list[Cancel], moved: list[str]
) -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.tokens("a", 1, [5, 5, 5])
    hello = msgspec.structs.replace(
        HELLO,
        held=tuple(HeldAssignment(number, "0.0", attempt=1, length=length) for number, length in held),
        weight_version=0,
    )
    outcome = stage.agent("a", hello)
    assert (sent(outcome, Resend), sent(outcome, Cancel)) == (resent, cancelled)
    assert [event.cause for event in outcome.events if isinstance(event, Moved)] == moved


@pytest.mark.parametrize(
    ("reason", "cause", "pauses", "version"),
    [
        pytest.param("engineError", "engineError", True, 0, id="the engine failed"),
        pytest.param("fire", "engineError", True, 0, id="a reason of a later version"),
        pytest.param("draining", "draining", True, 0, id="it drains, and did not say so"),
        pytest.param("rejected", "rejected", False, 0, id="the sample is at fault"),
        pytest.param("versionChanged", "versionChanged", False, -1, id="it is about to load another version"),
    ],
)
def test_what_giving_back_means(reason: str, cause: str, pauses: bool, version: int) -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    outcome = stage.agent("a", HandBack(1, reason))
    assert [event.cause for event in outcome.events if isinstance(event, Moved)] == [cause]
    paused = [event.cause for event in outcome.events if isinstance(event, EngineQuarantined)]
    assert paused == ([cause] if pauses else [])
    assert stage.ledger.state.engines["a"].version == version
    assert not sent(outcome, Assign), "straight back, it would only be repeated"


def test_what_another_engine_runs_is_not_its_to_give() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.engine("b")
    assert not [event for event in stage.agent("b", HandBack(1, "rejected")).events if isinstance(event, Moved)]
    assert not sent(stage.agent("b", WeightsLoaded(0, 0.1, load_seconds=0.1, bytes_pulled=1)), Assign)


@pytest.mark.slow
def test_an_engine_that_refuses_everything_drops_nothing_and_pauses() -> None:
    """Three healthy engines are full, 200 groups wait, and one more engine refuses whatever it gets."""
    stage = Stage()
    for name in "xyz":
        stage.engine(name, max_running=1)
    stage.submit(203)
    stage.engine("broken", max_running=4)
    refused: list[str] = []
    for _ in range(600):
        stage.now += 0.05
        stage.agent("broken", Heartbeat(0, 0, kv_free_tokens=100_000))
        for name in "xyz":
            stage.tokens(name, next(iter(stage.ledger.state.engines[name].running)), [5] * (stage.now % 1 < 0.05))
        for number in tuple(stage.ledger.state.engines["broken"].running):
            refused.append(stage.ledger.state.assignments[number].sample)
            stage.agent("broken", HandBack(number, "rejected", detail="400"))
        stage.pass_time(0.0)
    assert stage.ledger.state.counters.discarded == {}
    assert len(set(refused)) == len(refused), "never back to the engine that refused it"
    assert len(refused) <= 12, "a pause that doubles, then one sample at a time"
    paused = [event.cause for event in stage.events if isinstance(event, EngineQuarantined)]
    assert set(paused) == {"rejected"}
    states = {engine.name: engine.state for engine in stage.ledger.status(stage.now).engines}
    assert states["broken"] == "suspect"


def refusing(stage: Stage, engine: str, seconds: float) -> tuple[list[float], list[GroupDropped]]:
    """`engine` refuses whatever it gets; when it did, and what was dropped."""
    times, dropped = list[float](), list[GroupDropped]()
    for _ in range(round(seconds / 0.5)):
        for number in tuple(stage.ledger.state.engines[engine].running):
            times.append(stage.now)
            dropped += sent(stage.agent(engine, HandBack(number, "rejected", detail="too long")), GroupDropped)
        for name in tuple(stage.ledger.state.engines):
            stage.agent(name, Heartbeat(0, 0, kv_free_tokens=100_000))
        stage.pass_time(0.5)
    return times, dropped


def test_the_only_engine_is_believed_at_the_deadline() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(n=2)
    deadline_s = stage.ledger.state.config.refusal_deadline_s
    _, dropped = refusing(stage, "a", deadline_s - 10)
    assert not dropped
    waits = [wait.sentence(stage.now) for wait in stage.ledger.waits(stage.now)]
    (why,) = [wait for wait in waits if "samples that a refused" in wait]
    assert why.startswith("2 samples that a refused waits for room from an engine that has not refused them")
    assert why.endswith("for 290.0 s so far, at most 10.0 s more")
    times, dropped = refusing(stage, "a", 2 * stage.ledger.state.config.suspect_max_s)
    assert len(times) <= 3, "each sample is tried once more"
    assert (dropped[0].reason, "too long" in dropped[0].detail) == (DiscardReason.ENGINE_REJECTED, True)
    assert stage.ledger.status(0.0).samples.discarded == {"engineRejected": 1, "groupIncomplete": 1}


def refusing_one(stage: Stage, seconds: float) -> list[GroupDropped]:
    """Engine `a` refuses sample 0.0 and gives all others a token in each tenth of a second; what was dropped."""
    dropped = list[GroupDropped]()
    for _ in range(round(seconds / 0.1)):
        for number in tuple(stage.ledger.state.engines["a"].running):
            if stage.ledger.state.assignments[number].sample == "0.0":
                dropped += sent(stage.agent("a", HandBack(number, "rejected", detail="too long")), GroupDropped)
            else:
                stage.tokens("a", number, [5])
        stage.agent("a", Heartbeat(0, 0, kv_free_tokens=100_000))
        stage.pass_time(0.1)
    return dropped


def test_the_only_engine_is_believed_once_it_has_given_tokens_since_and_nothing_else_is_left() -> None:
    stage = Stage()
    stage.engine("a", max_running=2)
    stage.submit(2)
    assert not refusing_one(stage, 8.0), "while the other sample generates nobody waits for it"
    (other,) = stage.ledger.state.engines["a"].running
    stage.tokens("a", other, [6], finish="stop")
    dropped = refusing_one(stage, stage.ledger.state.config.suspect_max_s)
    assert [one.reason for one in dropped] == [DiscardReason.ENGINE_REJECTED]
    assert "(a): too long" in dropped[0].detail


def test_the_only_engine_is_believed_after_as_many_refusals_as_several_would_be() -> None:
    stage = Stage()
    stage.engine("a", max_running=2)
    stage.submit(2, max_new_tokens=5)
    (dropped,) = refusing_one(stage, 10.0)
    assert dropped.detail.startswith("engines refused it 3 times (a)")


def test_tokens_from_before_a_refusal_do_not_show_that_the_engine_still_works() -> None:
    stage = Stage()
    stage.engine("a", max_running=2)
    stage.submit(2)
    running = {
        stage.ledger.state.assignments[number].sample: number for number in stage.ledger.state.engines["a"].running
    }
    stage.tokens("a", running["1.0"], [5, 6], finish="stop")
    stage.pass_time(0.1)
    assert not refusing_one(stage, 2 * stage.ledger.state.config.suspect_max_s)


def test_an_engine_that_may_still_take_it_is_waited_for() -> None:
    stage = Stage()
    stage.engine("a", max_running=2)
    stage.submit(2)
    refusing_one(stage, 8.0)
    stage.engine("b", max_running=1)
    assert stage.placed()["b"]


def test_one_engine_that_refuses_one_sample_only_is_not_asked_for_it_without_a_pause() -> None:
    """Its pause for refusals ends with each token that it gives for another one."""
    stage = Stage()
    stage.engine("a", max_running=2)
    stage.submit(2)
    refused = 0
    for _ in range(600):
        for number in tuple(stage.ledger.state.engines["a"].running):
            if stage.ledger.state.assignments[number].sample == "0.0":
                refused += 1
                stage.agent("a", HandBack(number, "rejected"))
            else:
                stage.tokens("a", number, [5] * (stage.now % 1 < 0.1))
        stage.pass_time(0.1)
    assert 3 <= refused <= 7


def test_an_engine_that_comes_within_the_deadline_gets_what_the_only_one_refused() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(4)
    refusing(stage, "a", 60.0)
    stage.engine("b")
    assert len(stage.placed()["b"]) == 4


def test_tokens_of_what_it_had_before_do_not_excuse_an_engine_that_refuses_the_rest() -> None:
    stage = Stage()
    stage.engine("a", max_running=2)
    stage.submit()
    stage.tokens("a", 1, [5])
    stage.submit(4)
    for number in (2, 3, 4):
        stage.agent("a", HandBack(number, "rejected"))
        stage.tokens("a", 1, [5])
    assert stage.ledger.state.engines["a"].quarantined_until > stage.now
    stage.pass_time_heard(2.0)
    stage.tokens("a", 1, [5])
    assert stage.placed()["a"] == ["0.0"]


def test_the_first_token_of_a_sample_excuses_earlier_refusals() -> None:
    stage = Stage()
    stage.engine("a", max_running=1)
    stage.submit(6)
    for _ in range(2):
        stage.agent("a", HandBack(next(iter(stage.ledger.state.engines["a"].running)), "rejected"))
    assert stage.ledger.state.engines["a"].rejections == 2
    stage.tokens("a", next(iter(stage.ledger.state.engines["a"].running)), [5])
    assert stage.ledger.state.engines["a"].rejections == 0


def test_tokens_of_versions_that_it_served_while_nobody_listened_are_taken() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit(max_version=2)
    stage.publish(1)
    stage.publish(2)
    held = (HeldAssignment(1, "0.0", attempt=1, length=2),)
    stage.agent("a", msgspec.structs.replace(HELLO, held=held, weight_version=2, versions=(0, 1, 2)))
    outcome = stage.tokens("a", 1, [5, 5], version=1)
    assert not [event for event in outcome.events if isinstance(event, Moved | EngineQuarantined)]
    assert stage.ledger.state.samples["0.0"].length == 2


def test_a_notice_given_while_nobody_listened_is_in_the_greeting() -> None:
    stage = Stage()
    stage.engine("a")
    outcome = stage.agent("a", msgspec.structs.replace(HELLO, leaving_s=20.0, leaving_reason="spot"))
    (welcome, drain) = sent(outcome, (Welcome, StartDrain))
    assert (type(welcome), drain) == (Welcome, StartDrain(20.0, "spot"))
    assert stage.ledger.state.engines["a"].drain_at == stage.now + 20.0


def test_what_an_engine_says_of_its_load_is_no_more_than_can_be() -> None:
    stage = Stage()
    stage.engine("a", max_running=8, kv_tokens=1_000)
    for running, queued, kv_free in ((-(10**9), -(10**9), -(10**9)), (10**9, 10**9, 10**9)):
        stage.agent("a", Heartbeat(running, queued, kv_free_tokens=kv_free))
        assert stage.ledger.state.engines["a"].load in ((0, 0, 0), (8, 8, 1_000))
