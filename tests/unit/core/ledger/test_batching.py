"""Filters, how groups end, what answers a batch request."""

from __future__ import annotations

import pytest

from polyrl import wire
from polyrl.ledger import LedgerConfig
from polyrl.ledger.batching import discard_group, passes
from polyrl.ledger.transition import Transition
from polyrl.sample import DiscardReason, Finish, Response, Scored
from polyrl.wire import Accepted, Batch, Cancel, Declined, GroupDropped, Late
from polyrl_rollout.testing.stage import Stage, sent


def ready(count: int = 1, n: int = 1, group_filter: str = "none", **fields: object) -> Stage:
    stage = Stage(LedgerConfig(run_epoch=1, group_filter=group_filter))
    stage.engine("a", max_running=64)
    stage.submit(count, n, **fields)
    return stage


def groups(batch: Batch) -> list[int]:
    return list(dict.fromkeys(scored.group for scored in batch.samples))


@pytest.mark.parametrize(
    ("group_filter", "rewards", "expected"),
    [
        pytest.param("none", [0, 0], True, id="none"),
        pytest.param("custom", [0, 0], True, id="custom is the trainer's"),
        pytest.param("anySuccess", [0, 0], False, id="no success"),
        pytest.param("anySuccess", [-1, 0], False, id="failures only"),
        pytest.param("anySuccess", [0, 0.1], True, id="one success"),
        pytest.param("nonzeroSpread", [1, 1], False, id="all succeed"),
        pytest.param("nonzeroSpread", [0.5], False, id="one sample has no spread"),
        pytest.param("nonzeroSpread", [0, 1], True, id="a spread"),
    ],
)
def test_filters(group_filter: str, rewards: list[float], expected: bool) -> None:
    assert passes(group_filter, rewards) is expected


@pytest.mark.parametrize(
    ("least", "most", "max_tokens", "complete", "expected"),
    [
        pytest.param(1, 64, 10**6, 2, [0, 1], id="what is ready"),
        pytest.param(5, 64, 10**6, 2, None, id="fewer than the least: wait"),
        pytest.param(4, 64, 10**6, 2, [0, 1], id="exactly the least"),
        pytest.param(1, 2, 10**6, 2, [0], id="one group fills it"),
        pytest.param(1, 3, 10**6, 2, [0], id="half a group is none"),
        pytest.param(3, 3, 10**6, 2, [0], id="full with less than the least asked for"),
        pytest.param(1, 64, 24, 2, [0], id="tokens for one group"),
        pytest.param(1, 64, 1, 2, [0], id="one group may exceed them"),
        pytest.param(1, 64, 48, 2, [0, 1], id="tokens for both exactly"),
        pytest.param(64, 64, 10**6, 3, [0, 1, 2], id="the last one, although short"),
        pytest.param(64, 4, 10**6, 2, [0, 1], id="the least is bounded by the most"),
        pytest.param(0, 64, 10**6, 0, None, id="nothing ready, though nothing is the least"),
        pytest.param(1, 64, 10**6, 0, None, id="nothing ready"),
    ],
)
def test_packing(least: int, most: int, max_tokens: int, complete: int, expected: list[int] | None) -> None:
    stage = ready(3, n=2)
    for group in range(complete):
        for index in range(2):
            sample = f"{group}.{index}"
            stage.tokens("a", stage.number(sample), [5, 2], "stop")
            stage.score(sample)
    batches = sent(stage.ask(least, most, max_tokens=max_tokens), Batch)
    assert [groups(batch) for batch in batches] == ([] if expected is None else [expected])
    assert all(batch.last is (expected == [0, 1, 2]) for batch in batches)


def test_the_largest_batch_fits_into_a_frame() -> None:
    """Samples of the longest metrics and names: the trainer's connection would end at a larger frame, for ever."""
    number = 2**63 - 1
    name = f"{number}.4095"
    longest = {"m" * (wire.MAX_METRICS_BYTES - wire.NUMBER_BYTES): 0.1}
    many = {f"{index:04}": 0.1 for index in range(wire.MAX_METRICS_BYTES // (wire.NUMBER_BYTES + 4))}
    for metrics in (longest, many):
        assert not wire.excess_of_metrics(metrics)
        bare = Response(name, b"", logprobs=b"", loss_mask=b"", spans=(), turn=number, finish=Finish.LENGTH)
        one = Scored(number, 4095, response=bare, reward=0.1, metrics=metrics)
        both = Batch(1, 1, step=1, samples=(one, one), last=False, checks=(2**32 - 1,) * 2)
        single = Batch(1, 1, step=1, samples=(one,), last=False, checks=(2**32 - 1,))
        each = len(wire.encode(both)) - len(wire.encode(single))
        assert each * wire.MAX_BATCH_SAMPLES + 1024 < wire.MAX_FRAME_BYTES


def test_a_batch_holds_no_more_than_a_frame_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BATCH_SAMPLES", 4)
    stage = ready(3, n=2)
    stage.finish_all()
    first, second = (sent(stage.ask(64, 64), Batch)[0] for _ in range(2))
    assert (groups(first), groups(second)) == ([0, 1], [2])
    assert (first.last, second.last) == (False, True)


def test_a_waiting_next_is_answered_by_the_event_it_waits_for() -> None:
    stage = ready(2)
    assert not sent(stage.ask(), Batch)
    stage.tokens("a", stage.number("1.0"), [2], "stop")
    (batch,) = sent(stage.score("1.0"), Batch)
    assert (groups(batch), batch.last, batch.number) == ([1], False, 0)


def test_groups_come_in_order_of_completion_and_last_is_true_at_the_end() -> None:
    stage = ready(2)
    for sample in ("1.0", "0.0"):
        stage.tokens("a", stage.number(sample), [2], "stop")
        stage.score(sample)
    (batch,) = sent(stage.ask(), Batch)
    assert (groups(batch), batch.last) == ([1, 0], True)


def test_an_asked_batch_is_repeated_until_it_is_acknowledged() -> None:
    stage = ready(2)
    stage.finish_all()
    first = sent(stage.ask(most=1, request=500), Batch)
    assert sent(stage.ask(most=1, request=500), Batch) == first
    assert sent(stage.acknowledge(0), Accepted)
    assert sent(stage.acknowledge(0), Accepted)
    assert sent(stage.acknowledge(7), Declined)
    assert stage.ledger.status(0.0).samples.acknowledged == 1


def test_a_batch_is_no_last_one_for_a_trainer_that_may_yet_replace_what_was_dropped() -> None:
    stage = ready(2)
    stage.takes_notices = False
    stage.reject("1.0")
    stage.finish_all()
    (batch,) = sent(stage.ask(), Batch)
    assert (groups(batch), batch.last) == ([0], False)
    assert not sent(stage.ask(), Batch), "a replacement may come"


def test_nothing_left_is_an_empty_last_batch_also_when_the_rest_is_dropped_meanwhile() -> None:
    stage = ready()
    assert sent(stage.ask(step=9), Batch)[0].last
    assert not sent(stage.ask(), Batch)
    outcome = stage.reject("0.0")
    assert [(batch.samples, batch.last) for batch in sent(outcome, Batch)] == [((), True)]
    stage.submit()
    assert not sent(stage.ask(), Batch), "a replacement opens the step again"


def test_late_names_who_is_awaited() -> None:
    stage = ready(2)
    stage.tokens("a", 1, [2], "stop")
    stage.ask(deadline_s=2.0)
    (late,) = sent(stage.pass_time(2.0), Late)
    for part in ("2 of 2 groups are open", "1 on a", "1 samples wait for a verdict"):
        assert part in late.waiting_for
    assert any("trainer" in wait.sentence(stage.now) for wait in stage.ledger.waits(stage.now))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"deadline_s": 2.0}, id="late"),
        pytest.param({"most": 2, "least": 2}, id="refused"),
        pytest.param({"step": 9}, id="nothing left"),
    ],
)
def test_an_answer_without_samples_is_repeated_too(fields: dict[str, float]) -> None:
    """The trainer takes the first answer to a request; a batch for a second one would be trained by nobody."""
    stage = ready(2, n=3)
    stage.tokens("a", stage.number("0.0"), [2], "stop")
    if "most" in fields:
        stage.finish_all()
        stage.score("0.0")
    outcomes = [stage.ask(request=500, **fields), stage.pass_time(2.0)]  # type: ignore[arg-type]
    first = [answer for outcome in outcomes for answer in sent(outcome, (Late, Declined, Batch))]
    assert len(first) == 1
    stage.finish_all()
    stage.submit(step=9)
    again = stage.ask(request=500, **fields)  # type: ignore[arg-type]
    assert sent(again, (Late, Declined, Batch)) == first
    assert not stage.ledger.state.batches
    assert sent(stage.ask(step=9, least=9), Batch) == []
    assert len(stage.ledger.state.pending) == 1


def test_a_group_larger_than_max_samples_is_refused_with_the_numbers() -> None:
    stage = ready(n=3)
    stage.finish_all()
    (refused,) = sent(stage.ask(most=2), Declined)
    assert "3 samples of group 0" in refused.reason


@pytest.mark.parametrize(
    ("culprit", "reason", "notify", "counted"),
    [
        pytest.param("0.1", "rewardRaised", True, {"rewardRaised": 1, "groupIncomplete": 2}, id="one takes all along"),
        pytest.param("", "surplus", True, {"surplus": 3}, id="nobody's fault"),
        pytest.param("", "cancelled", False, {"cancelled": 3}, id="the trainer asked for it"),
    ],
)
def test_how_a_group_ends_untrained(culprit: str, reason: str, notify: bool, counted: dict[str, int]) -> None:
    stage = ready(n=3)
    stage.tokens("a", stage.number("0.2"), [2], "stop")
    transition = Transition(stage.ledger.state, stage.now)
    discard_group(transition, 0, DiscardReason(reason), culprit, notify=notify)
    assert stage.ledger.state.counters.discarded == counted
    assert sent(transition.effects, Cancel) == [Cancel(1), Cancel(2)], "what runs, and no other"
    assert bool(sent(transition.effects, GroupDropped)) is notify
    assert not stage.ledger.state.samples
