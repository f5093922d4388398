"""The trainer's messages: verdicts, steps, versions, the end."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import msgspec
import pytest

from polyrl import wire
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.ledger.events import Assigned
from polyrl.ledger.messages import trainer as trainer_messages
from polyrl.sample import DiscardReason, Group, Purpose, SamplingParams
from polyrl.wire import (
    MAX_REASON,
    Accepted,
    Acknowledge,
    Announce,
    Assign,
    Batch,
    Cancel,
    Declined,
    Deregister,
    EndStep,
    Fenced,
    Fetch,
    Fetched,
    FetchedText,
    FinishRun,
    GroupDropped,
    PublishVersion,
    Reject,
    Score,
    StartDrain,
    Submit,
    TrainerHeartbeat,
    TrainerHello,
    TrainerReport,
    TurnDone,
    TurnsAwaited,
    Withdraw,
    checksum_of,
    pack_ids,
)
from polyrl_rollout.testing.stage import Stage, sent


def ready(count: int = 1, n: int = 1, group_filter: str = "none", **fields: object) -> Stage:
    stage = Stage(LedgerConfig(run_epoch=1, group_filter=group_filter))
    stage.engine("a", max_running=64)
    stage.submit(count, n, **fields)
    return stage


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_group_that_fails_the_filter_is_dropped_unless_it_only_measures(purpose: Purpose) -> None:
    stage = ready(n=2, group_filter="nonzeroSpread", purpose=purpose)
    for number, sample in ((1, "0.0"), (2, "0.1")):
        stage.tokens("a", number, [2], "stop")
        outcome = stage.score(sample, 1.0)
    assert bool(sent(outcome, GroupDropped)) is (purpose is Purpose.TRAIN)


@pytest.mark.parametrize(
    ("metrics", "dropped"),
    [
        pytest.param([{}, {"turn_reward/1": 0.5}], False, id="a turn of one was paid"),
        pytest.param([{"turn_reward/1": 0.5}, {"turn_reward/1": 0.5}], True, id="turns were paid alike"),
        pytest.param([{"exact_match": 1.0}, {}], True, id="another number is no reward"),
    ],
)
def test_rewards_of_turns_are_a_spread(metrics: list[dict[str, float]], dropped: bool) -> None:
    stage = ready(n=2, group_filter="nonzeroSpread")
    for number, sample in ((1, "0.0"), (2, "0.1")):
        stage.tokens("a", number, [2], "stop")
        outcome = stage.trainer(wire.Score(stage.request(), sample, turn=0, reward=1.0, metrics=metrics[number - 1]))
    assert bool(sent(outcome, GroupDropped)) is dropped


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"most": 0}, id="nothing"),
        pytest.param({"least": -2, "most": -1}, id="less than nothing"),
        pytest.param({"deadline_s": float("nan")}, id="a deadline that is no number"),
        pytest.param({"deadline_s": -1.0}, id="a deadline in the past"),
    ],
)
def test_an_impossible_next_is_refused(fields: dict[str, float]) -> None:
    assert sent(ready().ask(**fields), Declined)  # type: ignore[arg-type]


def test_a_reject_takes_the_group_along_and_cancels_what_runs() -> None:
    stage = ready(n=3)
    outcome = stage.reject("0.1", DiscardReason.REWARD_TIMED_OUT)
    assert len(sent(outcome, Cancel)) == 3
    assert stage.ledger.status(0.0).samples.discarded == {"rewardTimedOut": 1, "groupIncomplete": 2}
    assert sent(stage.score("0.0"), Accepted), "a verdict on what has ended is moot"


def test_verdicts_are_idempotent_by_turn() -> None:
    stage = ready()
    stage.tokens("a", 1, [2], "stop")
    assert sent(stage.score("0.0", turn=1), Declined)
    assert sent(stage.extend("0.0", []), Declined)
    assert sent(stage.extend("0.0", [7]), Accepted)
    assert sent(stage.extend("0.0", [7]), Accepted)
    assert stage.ledger.state.samples["0.0"].length == 2
    stage.tokens("a", stage.number("0.0"), [2], "stop")
    assert sent(stage.score("0.0", float("inf"), turn=1), Declined)
    stage.score("0.0", 0.25, turn=1)
    stage.score("0.0", 0.75, turn=1)
    assert stage.ledger.state.samples["0.0"].reward == 0.25


@pytest.mark.parametrize("sample", ["7.0", "x", "", "0.9", "9.9.9"])
def test_unknown_samples(sample: str) -> None:
    assert sent(ready().score(sample), Accepted if sample == "0.9" else Declined)


def test_a_turn_is_asked_again_with_back_off_and_after_a_greeting() -> None:
    stage = ready()
    assert sent(stage.tokens("a", 1, [2], "stop"), TurnDone)
    stage.agent("a", Deregister("done"))
    again = [TurnsAwaited((("0.0", 0),))]
    assert not sent(stage.pass_time(9.9), TurnsAwaited)
    assert sent(stage.pass_time(0.1), TurnsAwaited) == again
    assert not sent(stage.pass_time(19.0), TurnsAwaited)
    assert sent(stage.pass_time(1.0), TurnsAwaited) == again
    assert sent(stage.trainer(TrainerHello(1, -1)), TurnsAwaited) == again, "a name, not the text"


def test_the_greeting_repeats_what_was_dropped_and_acknowledges() -> None:
    stage = ready(3)
    stage.takes_notices = False
    stage.reject("2.0")
    stage.finish_all()
    stage.ask(most=1)
    outcome = stage.trainer(TrainerHello(1, 0))
    assert sent(outcome, GroupDropped)
    assert stage.ledger.status(0.0).samples.acknowledged == 1


def test_end_step_discards_the_rest_as_surplus_once() -> None:
    stage = ready(3)
    stage.tokens("a", 1, [2], "stop")
    stage.score("0.0")
    stage.ask()
    end = EndStep(900, 0, purpose=Purpose.TRAIN)
    assert len(sent(stage.trainer(end), Cancel)) == 2
    stage.submit()
    assert not sent(stage.trainer(end), Cancel), "a repetition does not touch what came later"
    assert stage.ledger.status(0.0).samples.discarded == {"surplus": 2}
    assert sent(stage.acknowledge(0), Accepted)


@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_a_large_step_ends_in_slices_that_leave_time_for_others(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_messages, "DISCARDED_AT_ONCE", most)
    stage = ready(10)
    stage.now = 1.0
    stage.tokens("a", 10, [2], "stop")
    stage.score("9.0")
    stage.ask(least=2)
    ledger, left, slices = stage.ledger, 10, 1
    end = EndStep(900, 0, purpose=Purpose.TRAIN)
    answers = ledger.from_trainer(end, stage.now).to_trainer
    while Accepted(900) not in answers:
        assert left - most <= len(ledger.state.groups) < left, "a slice, and not more"
        left = len(ledger.state.groups)
        assert ledger.next_due() == stage.now, "the next slice is due at once"
        ledger.from_trainer(TrainerHeartbeat(), stage.now)
        assert len(ledger.state.groups) == left, "others are heard meanwhile"
        answers += ledger.tick(stage.now).to_trainer
        slices += 1
    assert slices == -(-10 // most)
    assert ledger.status(1.0).samples.discarded == {"surplus": 10}
    assert [len(one.samples) for one in answers if isinstance(one, Batch)] == [0], "what is complete is surplus too"
    assert ledger.from_trainer(end, stage.now).to_trainer == [Accepted(900)]
    assert (ledger.next_due() or 0.0) > stage.now


def test_nothing_of_a_step_that_ends_is_given_to_the_engines_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_messages, "DISCARDED_AT_ONCE", 4)
    stage = Stage()
    stage.engine("a")
    stage.submit(20)
    stage.submit(8, step=1)
    ledger, events = stage.ledger, list[object]()
    events += ledger.from_trainer(EndStep(900, 0, purpose=Purpose.TRAIN), stage.now).events
    while len(ledger.state.groups) > 8:
        events += ledger.tick(stage.now).events
    given = [event.sample for event in events if isinstance(event, Assigned)]
    assert given == [f"{number}.0" for number in range(20, 28)]


def test_what_is_submitted_while_its_step_ends_opens_the_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the end: when its batch was withdrawn, it was surplus, and nobody heard of that."""
    monkeypatch.setattr(trainer_messages, "DISCARDED_AT_ONCE", 3)
    stage = ready(10)
    ledger, more = stage.ledger, msgspec.structs.replace(stage.ledger.state.groups[0].group, id=20)
    for message in (EndStep(900, 0, purpose=Purpose.TRAIN), Submit(901, (more,))):
        ledger.from_trainer(message, stage.now)
    while Accepted(900) not in ledger.tick(stage.now).to_trainer:
        assert ledger.next_due() == stage.now
    (number,) = ledger.state.assignments
    stage.tokens("a", number, [2], "stop")
    stage.score("20.0")
    stage.ask(request=800)
    stage.trainer(Withdraw(801, 800))
    assert len(sent(stage.ask(request=802), Batch)[0].samples) == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_who_hears_of_no_end_asks_again_and_gets_it(restarted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that is started again has forgotten that a step was about to end; another trainer asks for no end."""
    monkeypatch.setattr(trainer_messages, "DISCARDED_AT_ONCE", 3)
    stage = ready(10)
    end = EndStep(900, 0, purpose=Purpose.TRAIN)
    stage.ledger.from_trainer(end, stage.now)
    if restarted:
        ledger = Ledger(stage.ledger.state.config, stage.ledger.state)
        ledger.resume(stage.now)
    else:
        ledger = stage.ledger
        ledger.from_trainer(TrainerHello(1, -1, trainer="another"), stage.now)
    ledger.tick(stage.now)
    assert len(ledger.state.groups) == 7
    while Accepted(901) not in ledger.from_trainer(EndStep(901, 0, purpose=Purpose.TRAIN), stage.now).to_trainer:
        assert ledger.state.groups
    assert not ledger.state.groups


def test_a_batch_that_is_withdrawn_while_its_step_ends_is_surplus_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_messages, "DISCARDED_AT_ONCE", 3)
    stage = ready(10)
    stage.tokens("a", 1, [2], "stop")
    stage.score("0.0")
    stage.ask(request=800)
    ledger = stage.ledger
    for message in (EndStep(900, 0, purpose=Purpose.TRAIN), Withdraw(801, 800)):
        ledger.from_trainer(message, stage.now)
    while ledger.state.steps:
        assert ledger.next_due() == stage.now
        ledger.tick(stage.now)
    assert ledger.status(0.0).samples.discarded == {"surplus": 10}


def test_submissions_are_idempotent_in_any_order() -> None:
    stage = Stage()
    stage.submit(2, step=1)
    stage._group = 5
    stage.submit(2, step=1)
    stage._group = 2
    stage.submit(3, step=1)
    stage._group = 0
    stage.submit(7, step=1)
    assert stage.ledger.status(0.0).samples.submitted == 7
    assert stage.ledger.state.seen == [(0, 7)]
    assert stage.ledger.state.was_submitted(6)
    assert not stage.ledger.state.was_submitted(7)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        pytest.param({"n": 0}, "n is 0", id="no samples"),
        pytest.param({"prompt_ids": b""}, "prompt", id="no prompt"),
        pytest.param({"prompt_ids": b"12345"}, "prompt", id="no whole tokens"),
        pytest.param({"max_new_tokens": 0}, "max_new_tokens", id="no budget"),
        pytest.param({"max_new_tokens": wire.MAX_SAMPLE_TOKENS - 9}, "are 4194305 tokens", id="no frame holds it"),
        pytest.param({"min_version": 2, "max_version": 1}, "versions 2 to 1", id="no version"),
        pytest.param({"id": -1}, "negative", id="no number"),
        pytest.param({"id": 2**64 - 1}, "must not exceed", id="the last number that a message holds"),
        pytest.param({"step": 2**53 + 1}, "must not exceed", id="a step that no status holds"),
        pytest.param({"max_version": 2**53 + 1}, "must not exceed", id="a version that no status holds"),
        pytest.param({"priority": -(2**53) - 1}, "must not exceed", id="a priority that no journal holds"),
        # Each engine would make another distribution of them, and the learner a third one.
        pytest.param({"sampling": SamplingParams(8, nan)}, "temperature is nan", id="no temperature"),
        pytest.param({"sampling": SamplingParams(8, inf)}, "temperature is inf", id="an endless temperature"),
        pytest.param({"sampling": SamplingParams(8, -1.0)}, "temperature is -1", id="a temperature below 0"),
        pytest.param({"sampling": SamplingParams(8, 1e-7)}, "neither 0 nor", id="almost greedy"),
        pytest.param({"sampling": SamplingParams(8, top_p=0.0)}, "top_p is 0", id="no token likely enough"),
        pytest.param({"sampling": SamplingParams(8, top_k=0)}, "top_k is 0", id="no token at all"),
    ],
)
def test_impossible_groups_are_refused_with_the_reason(fields: dict[str, Any], word: str) -> None:
    (refused,) = sent(Stage().submit(**({"count": 1} | fields)), Declined)
    assert word in refused.reason


@pytest.mark.parametrize("version", [-1, 2**53 + 1])
def test_a_version_that_no_status_holds_is_refused(version: int) -> None:
    stage = Stage()
    (refused,) = sent(
        stage.trainer(PublishVersion(77, version, endpoint="e", public_key="key", manifest_hash=b"other")), Declined
    )
    assert "is not in 0 .. 9007199254740992" in refused.reason


def test_the_largest_sample_is_taken_and_not_a_token_more_is_written_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_SAMPLE_TOKENS", 110)
    stage = Stage()
    stage.engine("a")
    stage.submit(max_new_tokens=100)
    stage.tokens("a", stage.number("0.0"), [5, 2], "stop")
    (refused,) = sent(stage.extend("0.0", [8] * 99), Declined)
    assert "111 tokens of it" in refused.reason
    assert sent(stage.extend("0.0", [8] * 98), Assign)


def test_versions_reach_every_engine_and_joiners() -> None:
    stage = ready()
    stage.engine("b", version=-1)
    assert len(sent(stage.publish(1), Announce)) == 2
    assert sent(stage.publish(1), Accepted)
    assert sent(
        stage.trainer(PublishVersion(77, 1, endpoint="elsewhere", public_key="key", manifest_hash=b"other")), Declined
    )
    assert [announce.version for announce in sent(stage.engine("c", version=-1), Announce)] == [1]


def test_finish_ends_everything_and_drains_everyone() -> None:
    stage = ready(2)
    stage.finish_all()
    stage.submit()
    stage.ask(most=1)
    outcome = stage.trainer(FinishRun(800, True, message="done"))
    assert sent(outcome, StartDrain)
    status = stage.ledger.status(0.0)
    assert status.samples.discarded == {"cancelled": 3}
    assert not status.samples.open
    assert status.finished
    assert sent(stage.submit(), Declined)
    assert sent(stage.engine("late", version=-1), StartDrain)
    assert sent(stage.trainer(FinishRun(801, True, message="done")), Accepted)


def test_a_stranger_of_another_epoch_is_fenced() -> None:
    stage = Stage()
    assert sent(stage.trainer(TrainerHello(2, -1)), Fenced)
    assert sent(stage.trainer(TrainerHeartbeat()), TrainerHeartbeat)


def test_the_newest_report_is_shown() -> None:
    stage = Stage()
    stage.trainer(TrainerReport(stage.request(), "rl", step=3, values={"reward": 0.5}))
    status = stage.ledger.status(0.0)
    assert (status.phase, status.step, status.values) == ("rl", 3, {"reward": 0.5})


def test_the_memory_of_ended_samples_is_nothing() -> None:
    stage = ready(16, n=4)
    stage.finish_all()
    stage.ask(most=1000)
    stage.trainer(Acknowledge(stage.request(), 0))
    state = stage.ledger.state
    live = (
        state.groups,
        state.samples,
        state.assignments,
        state.batches,
        state.awaiting_verdict,
        state.queue,
        state.pending,
    )
    assert not any(live)
    assert not sent(stage.pass_time(0.1), Assign)


def two_turns() -> Stage:
    """Sample 0.0 has ended its second turn, 0.1 its first, which is scored."""
    stage = ready(n=2)
    for sample in ("0.0", "0.1"):
        stage.tokens("a", stage.number(sample), [5, 2], "stop")
    stage.score("0.1")
    stage.extend("0.0", [8, 9])
    return stage


def test_a_later_turn_brings_what_came_since_the_verdict_on_the_one_before() -> None:
    stage = two_turns()
    (turn,) = sent(stage.tokens("a", stage.number("0.0"), [6, 2], "stop"), TurnDone)
    assert (turn.response.ids, len(turn.response.logprobs), turn.start) == (pack_ids([6, 2]), 8, 4)
    assert turn.check == checksum_of(pack_ids([5, 2, 8, 9]))


def test_a_trainer_of_another_name_gets_the_whole_text() -> None:
    stage = two_turns()
    stage.trainer(TrainerHello(1, -1, trainer="another"))
    (turn,) = sent(stage.tokens("a", stage.number("0.0"), [6, 2], "stop"), TurnDone)
    assert (turn.response.ids, turn.start) == (pack_ids([5, 2, 8, 9, 6, 2]), 0)


def test_texts_are_sent_to_whoever_asks_for_them() -> None:
    stage = two_turns()
    stage.tokens("a", stage.number("0.0"), [6, 2], "stop")
    outcome = stage.trainer(Fetch(4, ("0.1", "0.0", "9.9", "nonsense")))
    (text,), (turn,) = sent(outcome, FetchedText), sent(outcome, TurnDone)
    assert (text.response.sample, text.response.ids) == ("0.1", pack_ids([5, 2]))
    assert (turn.response.ids, turn.start) == (pack_ids([5, 2, 8, 9, 6, 2]), 0)
    assert outcome.to_trainer[-1] == Fetched(4, 4)


def test_one_answer_carries_so_many_texts_and_the_rest_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_messages, "FETCH_TOKENS", 5)
    stage = ready(4)
    stage.finish_all()
    outcome = stage.trainer(Fetch(4, ("0.0", "1.0", "2.0", "3.0")))
    count = len(sent(outcome, FetchedText))
    assert 0 < count < 4
    assert outcome.to_trainer[-1] == Fetched(4, count)


def test_one_number_for_two_groups_of_one_message_is_refused_and_neither_is_taken() -> None:
    stage = Stage()
    sampling = SamplingParams(10, stop_token_ids=(2,))
    one = Group(10, 0, Purpose.TRAIN, pack_ids([1]), 1, sampling, min_version=0, max_version=0)
    other = msgspec.structs.replace(one, prompt_ids=pack_ids([2]))
    (answer,) = sent(stage.trainer(Submit(1, (one, other))), Declined)
    assert "group 10 stands twice in one message" in answer.reason
    assert not stage.ledger.state.groups
    assert sent(stage.trainer(Submit(2, (one, one))), Accepted)
    assert list(stage.ledger.state.groups) == [10]


def test_metrics_that_no_batch_would_carry_are_refused_and_the_verdict_is_awaited() -> None:
    stage = ready(1)
    stage.tokens("a", 1, [5, 2], "stop")
    metrics = {f"m{number:07}": 1.0 for number in range(70_000)}
    (answer,) = sent(stage.trainer(Score(stage.request(), "0.0", turn=0, reward=1.0, metrics=metrics)), Declined)
    assert "sample 0.0: its metrics take 1680000 bytes" in answer.reason
    assert "at most 8192" in answer.reason
    assert "0.0" in stage.ledger.state.awaiting_verdict


def test_a_rejection_keeps_as_much_of_its_detail_as_is_journaled() -> None:
    assert Reject(1, "0.0", reason=DiscardReason.REWARD_RAISED, detail="x" * 5000).detail == "x" * MAX_REASON
