"""How an assignment ends: when a turn is over although nobody said so, who is believed, how long an engine pauses."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from polyrl.ledger.apply.samples import AVOID_S
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.events import EngineQuarantined, GroupDiscarded
from polyrl.ledger.scheduling.cost import placement_request
from polyrl.ledger.scheduling.moves import already_over, end_unservable, half_open, move, quarantine
from polyrl.ledger.status import waits_of
from polyrl.ledger.transition import Transition
from polyrl.sample import Finish
from polyrl.wire import (
    Assign,
    Cancel,
    Deregister,
    GroupDropped,
    HandBack,
    HandBackReason,
    TurnDone,
    WeightsLoaded,
    pack_ids,
)
from polyrl_rollout.testing.stage import Stage, sent

STOP = 2


def one_running(**fields: int) -> tuple[Stage, Transition]:
    """Engine `a` runs sample 0.0 as assignment 1."""
    stage = Stage()
    stage.engine("a")
    stage.submit(1, **fields)
    return stage, Transition(stage.ledger.state, stage.now)


@pytest.mark.parametrize(
    ("ids", "generated", "turn_start", "expected"),
    [
        pytest.param([], 0, 0, None, id="nothing yet"),
        pytest.param([5], 1, 0, None, id="an ordinary token"),
        pytest.param([5, STOP], 2, 0, Finish.STOP, id="its finish was lost with the engine"),
        pytest.param([STOP, 5], 2, 0, None, id="a stop token amid the response"),
        pytest.param([5, 5, 5, 5], 4, 0, Finish.LENGTH, id="the budget is used up"),
        pytest.param([5, 5, 5, STOP], 4, 0, Finish.STOP, id="the last token of the budget stops it"),
        pytest.param([5, STOP], 1, 2, None, id="an environment wrote the stop token"),
        pytest.param([5] * 6, 2, 6, None, id="what an environment writes costs no budget"),
    ],
)
def test_a_turn_that_is_over_without_a_word(
    ids: list[int], generated: int, turn_start: int, expected: Finish | None
) -> None:
    _, transition = one_running(max_new_tokens=4)
    sample = transition.state.samples["0.0"]
    sample.ids += pack_ids(ids)
    sample.generated, sample.turn_start = generated, turn_start
    assert already_over(transition, sample) is expected


@pytest.mark.parametrize(
    ("failures", "first_pause_s", "pause_s"),
    [
        pytest.param(0, None, 1.0, id="the first"),
        pytest.param(1, None, 2.0, id="twice as long"),
        pytest.param(5, None, 32.0, id="and so on"),
        pytest.param(6, None, 60.0, id="up to the longest"),
        pytest.param(5000, None, 60.0, id="for ever"),
        pytest.param(0, 30.0, 30.0, id="a stalled one begins with its deadline"),
        pytest.param(1, 30.0, 60.0, id="which doubles too"),
    ],
)
def test_pauses_of_an_engine_that_fails(failures: int, first_pause_s: float | None, pause_s: float) -> None:
    stage, transition = one_running()
    engine = transition.state.engines["a"]
    engine.failures = failures
    quarantine(transition, "a", MoveCause.ENGINE_ERROR, first_pause_s)
    assert (engine.quarantined_until - stage.now, engine.failures) == (pause_s, failures + 1)


@pytest.mark.parametrize(
    ("times", "pause_s"),
    [
        pytest.param(1, 0.0, id="once may be an accident"),
        pytest.param(2, 1.0, id="twice"),
        pytest.param(3, 2.0, id="twice as long"),
        pytest.param(9, 60.0, id="up to the longest"),
    ],
)
def test_pauses_of_an_engine_that_had_gone_silent(times: int, pause_s: float) -> None:
    stage, transition = one_running()
    transition.state.vanished["a"] = (times, stage.now)
    half_open(transition, "a")
    (event,) = [event for event in transition.effects.events if isinstance(event, EngineQuarantined)]
    assert (event.quarantined_until - stage.now, event.cause) == (pause_s, "returned")


@pytest.mark.parametrize(
    ("cause", "before", "since_s", "others", "why"),
    [
        pytest.param(MoveCause.REJECTED, ["x"], 0, 0, "", id="two engines may be wrong"),
        pytest.param(MoveCause.REJECTED, ["x", "y"], 0, 1, "3 times (x, y, a)", id="three are believed"),
        pytest.param(MoveCause.REJECTED, ["a", "a"], 299, 0, "", id="one is not, however often, before the deadline"),
        pytest.param(MoveCause.REJECTED, ["a", "a"], 300, 0, "3 times (a)", id="at last, where no other may serve it"),
        pytest.param(MoveCause.REJECTED, ["a", "a"], 300, 1, "", id="never, while another may"),
        pytest.param(MoveCause.LOST, ["x", "y"], 300, 0, "", id="no other cause speaks of the sample"),
    ],
)
def test_who_is_believed_about_a_sample(
    cause: MoveCause, before: list[str], since_s: float, others: int, why: str
) -> None:
    stage, transition = one_running()
    for number in range(others):
        stage.engine(f"other-{number}")
    sample = transition.state.samples["0.0"]
    sample.rejections, sample.rejected_by = len(before), sorted(set(before))
    sample.refused_at = transition.now - since_s
    move(transition, 1, cause, detail="too long")
    reasons = [event.detail for event in transition.effects.events if isinstance(event, GroupDiscarded)]
    assert reasons == ([f"engines refused it {why}: too long"] if why else [])


@pytest.mark.parametrize(
    ("cause", "avoided"),
    [
        *((cause, True) for cause in ("stalled", "engineError", "wrongVersion", "wrongTokens")),
        *((cause, False) for cause in ("lost", "draining", "versionChanged", "window", "rebalanced", "outgrown")),
    ],
)
def test_an_engine_is_avoided_for_a_failure_and_for_a_while(cause: str, avoided: bool) -> None:
    _, transition = one_running()
    move(transition, 1, MoveCause(cause))
    request = placement_request(transition.state, "0.0", 0.0)
    assert request.avoid == ("a" if avoided else "")
    assert placement_request(transition.state, "0.0", AVOID_S).avoid == ""


@pytest.mark.parametrize("cancel", [True, False], ids=["it still runs there", "its engine gave it back"])
def test_an_engine_that_still_runs_it_is_stopped(cancel: bool) -> None:
    _, transition = one_running()
    move(transition, 1, MoveCause.STALLED, cancel=cancel)
    assert sent(transition.effects, Cancel) == ([Cancel(1)] if cancel else [])
    assert (transition.state.samples["0.0"].avoid, transition.state.assignments) == ("a", {})
    assert transition.state.samples["0.0"].moved_at > -inf


@pytest.mark.parametrize(
    ("newest", "served", "max_context", "draining", "reason"),
    [
        pytest.param(5, 4, 4096, "", None, id="an engine may generate"),
        pytest.param(9, 4, 4096, "", None, id="one still may, although the newest may not"),
        pytest.param(9, 9, 4096, "", "stale", id="all are past it"),
        pytest.param(9, 4, 4096, "notice", "stale", id="who drains will not"),
        pytest.param(5, 9, 4096, "", None, id="another engine may come with what is published"),
        pytest.param(5, 4, 10, "", "promptTooLong", id="there is no room for a first token"),
        pytest.param(5, 4, 11, "", None, id="there is room for one, the budget is ten times that"),
        pytest.param(5, 9, 10, "", None, id="contexts of those that may not are no measure"),
    ],
)
def test_what_nobody_can_ever_serve(
    newest: int, served: int, max_context: int, draining: str, reason: str | None
) -> None:
    """A group of versions 3 to 5, whose prompt is 10 tokens and whose budget 100, waits."""
    stage = Stage()
    stage.submit(1, min_version=3, max_version=5)
    stage.engine("a", version=-1, max_context=max_context)
    state = stage.ledger.state
    state.engines["a"].version, state.engines["a"].draining = served, draining
    state.weights = msgspec.structs.replace(state.weights, version=newest)
    transition = Transition(state, stage.now)
    end_unservable(transition)
    assert list(state.counters.discarded) == ([] if reason is None else [reason])


def outgrowing(*, prompt: int = 10, budget: int = 100, context: int = 20) -> Stage:
    """Engine `a` runs both samples of a group."""
    stage = Stage()
    stage.engine("a", max_context=context)
    stage.submit(1, n=2, prompt_ids=pack_ids([9] * prompt), max_new_tokens=budget)
    return stage


@pytest.mark.parametrize(
    ("budget", "context", "limit"),
    [
        pytest.param(100, 4096, 100, id="the budget"),
        pytest.param(100, 110, 100, id="both alike"),
        pytest.param(100, 109, 99, id="the context"),
        pytest.param(100, 11, 1, id="a single token"),
    ],
)
def test_what_an_engine_may_generate(budget: int, context: int, limit: int) -> None:
    stage = Stage()
    stage.engine("a", max_context=context)
    (assign,) = sent(stage.submit(max_new_tokens=budget), Assign)
    assert assign.max_new_tokens == limit


@pytest.mark.parametrize(
    ("others", "moves"),
    [
        pytest.param({}, False, id="it is alone"),
        pytest.param({"b": 20}, False, id="another holds no more"),
        pytest.param({"b": 21}, True, id="another holds one token more"),
    ],
)
@pytest.mark.parametrize("finish", ["length", None], ids=["its engine says so", "its engine goes on"])
def test_a_sample_that_fills_its_context(others: dict[str, int], moves: bool, finish: str | None) -> None:
    stage = outgrowing()
    for name, context in others.items():
        stage.engine(name, max_context=context)
    outcome = stage.tokens("a", stage.number("0.0"), [5] * 10, finish)
    ended, moved = sent(outcome, TurnDone), sent(outcome, Assign)
    assert [turn.response.finish for turn in ended] == ([] if moves else [Finish.LENGTH])
    assert [(again.offset, again.max_new_tokens) for again in moved] == ([(10, 1)] if moves else [])
    assert bool(sent(outcome, Cancel)) is (finish is None)
    assert not sent(outcome, GroupDropped)
    assert stage.ledger.state.counters.migrations == ({"outgrown": 1} if moves else {})


def test_a_sample_goes_from_context_to_context_until_none_is_longer() -> None:
    stage = outgrowing()
    stage.engine("b", max_context=25)
    stage.tokens("a", stage.number("0.0"), [5] * 10, "length")
    (turn,) = sent(stage.tokens("b", stage.number("0.0"), [6] * 5, "length"), TurnDone)
    assert (len(turn.response.ids), turn.response.finish) == (4 * 15, Finish.LENGTH)


@pytest.mark.parametrize(
    ("written", "ends"), [(4, False), (5, True), (900, True)], ids=["one token fits", "none fits", "far longer"]
)
def test_what_an_environment_writes_never_discards(written: int, ends: bool) -> None:
    """Half of the context of 20 is the prompt, 5 tokens are the first turn."""
    stage = outgrowing()
    stage.tokens("a", stage.number("0.0"), [5] * 4 + [STOP], "stop")
    outcome = stage.extend("0.0", [8] * written)
    assert [turn.response.finish for turn in sent(outcome, TurnDone)] == ([Finish.LENGTH] if ends else [])
    assert len(sent(outcome, Assign)) == (not ends)
    assert stage.ledger.state.groups, "its group lives"


def test_a_short_tool_answer_under_a_large_budget_goes_on() -> None:
    stage = outgrowing(budget=4000, context=4096)
    stage.tokens("a", stage.number("0.0"), [5] * 4 + [STOP], "stop")
    (assign,) = sent(stage.extend("0.0", [8] * 100), Assign)
    assert (assign.offset, assign.max_new_tokens) == (105, 4096 - 115)


def test_when_the_longest_context_leaves_what_waits_for_it_ends_by_length() -> None:
    stage = outgrowing()
    stage.engine("b", max_context=100, max_running=1)
    for sample in ("0.0", "0.1"):
        stage.tokens("a", stage.number(sample), [5] * 10, "length")
    outcome = stage.agent("b", Deregister("gone"))
    assert sorted(turn.response.sample for turn in sent(outcome, TurnDone)) == ["0.0", "0.1"]
    assert not sent(outcome, GroupDropped)


def test_an_engine_that_still_loads_may_be_the_one_that_holds_it() -> None:
    stage = outgrowing()
    stage.engine("b", version=-1, max_context=100)
    outcome = stage.tokens("a", stage.number("0.0"), [5] * 10, "length")
    assert not sent(outcome, (TurnDone, Assign))
    (assign,) = sent(stage.agent("b", WeightsLoaded(0, 0.1, load_seconds=0.1, bytes_pulled=1)), Assign)
    assert (assign.sample, assign.max_new_tokens) == ("0.0", 80)


ALLOWED = 64
"""Of a context, by the manifest; the model's own is longer."""


def short_and_alone(claim: int, *, prompt: int = 10, positions: int = 1000) -> Stage:
    """Engine `a` is the only one, and says that it holds `claim` tokens."""
    stage = Stage(LedgerConfig(run_epoch=1, max_context=ALLOWED))
    stage.publish(1, positions=positions)
    stage.engine("a", version=1, max_context=claim)
    stage.submit(1, prompt_ids=pack_ids([9] * prompt), max_new_tokens=100, min_version=1, max_version=1)
    return stage


@pytest.mark.parametrize(
    ("prompt", "positions", "waits"),
    [
        pytest.param(30, 1000, True, id="what the manifest allows waits"),
        pytest.param(ALLOWED - 1, 1000, True, id="to its last token"),
        pytest.param(ALLOWED, 1000, False, id="there is room for it nowhere"),
        pytest.param(30, 39, True, id="what the model allows"),
        pytest.param(30, 38, False, id="less than the model allows, but for what an engine keeps"),
        pytest.param(30, 0, False, id="of the model nothing is known"),
    ],
)
def test_a_short_context_that_the_only_engine_claims_ends_no_prompt(prompt: int, positions: int, waits: bool) -> None:
    stage = short_and_alone(2, prompt=prompt, positions=positions)
    state = stage.ledger.state
    assert list(state.counters.discarded) == ([] if waits else ["promptTooLong"])
    sentences = [wait.sentence(stage.now) for wait in waits_of(state, stage.now)]
    those = [text for text in sentences if text.startswith(f"1 samples of up to {prompt} tokens waits for room")]
    assert len(those) == waits
    assert all("engines say that they hold a 2)" in text for text in those)
    stage.engine("b", version=1, max_context=1000)
    assert stage.placed() == {"a": [], "b": ["0.0"] if waits else []}


def test_a_sample_that_fills_the_only_engines_context_waits_for_what_is_allowed() -> None:
    stage = short_and_alone(20)
    outcome = stage.tokens("a", stage.number("0.0"), [5] * 10, "length", version=1)
    assert not sent(outcome, (TurnDone, GroupDropped))
    (assign,) = sent(stage.engine("b", version=1, max_context=1000), Assign)
    assert (assign.offset, assign.max_new_tokens) == (10, ALLOWED - 20)
    (turn,) = sent(stage.tokens("b", stage.number("0.0"), [6] * (ALLOWED - 20), "length", version=1), TurnDone)
    assert turn.response.finish is Finish.LENGTH


def test_engines_that_never_gave_a_token_decide_nothing_beside_one_that_works() -> None:
    """A pool whose engines are all broken alike: three of them agreed, and groups were lost."""
    stage = Stage()
    stage.engine("works", max_running=1)
    for name in ("s0", "s1", "s2", "s3"):
        stage.engine(name)
    stage.submit(12)
    for second in range(200):
        stage.now += 1.0
        for number, assignment in tuple(stage.ledger.state.assignments.items()):
            if assignment.engine != "works":
                stage.agent(assignment.engine, HandBack(number, HandBackReason.REJECTED))
            elif second % 4:
                stage.tokens("works", number, [5])
            else:
                stage.tokens("works", number, [5, 2], "stop")
        for name in tuple(stage.ledger.state.engines):
            stage.tokens(name, 0, [])
        stage.pass_time(0.0)
    assert not stage.ledger.state.counters.discarded
    assert len(stage.ledger.state.awaiting_verdict) == 12


def test_a_sample_that_the_one_that_works_refuses_too_is_refused() -> None:
    stage = Stage()
    stage.engine("works", max_running=2)
    stage.submit(1)
    stage.tokens("works", stage.number("0.0"), [5, 2], "stop")
    for name in ("s0", "s1", "s2"):
        stage.engine(name)
    stage.submit(1)
    for _ in range(6):
        number = stage.ledger.state.samples["1.0"].assignment if "1.0" in stage.ledger.state.samples else 0
        if number:
            stage.agent(stage.ledger.state.assignments[number].engine, HandBack(number, HandBackReason.REJECTED))
        stage.pass_time(0.1)
    assert stage.ledger.state.counters.discarded == {"engineRejected": 1}
