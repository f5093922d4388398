"""A trainer that starts again, a lost journal: what is offered anew, what is fenced, which numbers are taken."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from polyrl.ledger import Ledger, LedgerConfig
from polyrl.ledger.audit.audit import Audit
from polyrl.ledger.audit.history import HistoryProjection
from polyrl.ledger.journal import decode_state, encode_state
from polyrl.ledger.state import LedgerState
from polyrl.sample import DiscardReason, Pool, group_digest
from polyrl.wire import (
    Accepted,
    Acknowledge,
    Announce,
    Assign,
    Batch,
    Cancel,
    Declined,
    Fenced,
    Fetch,
    GroupDropped,
    HeldAssignment,
    Hello,
    PublishVersion,
    Resend,
    Submit,
    TrainerHeartbeat,
    TrainerHello,
    TrainerWelcome,
    TurnDone,
    TurnsAwaited,
    Welcome,
)
from polyrl_rollout.testing.stage import Stage, sent


def hello(
    trainer: str, acknowledged: int = -1, next_group: int = 0, next_batch: int = 0, fresh: bool = False
) -> TrainerHello:
    return TrainerHello(1, acknowledged, trainer=trainer, next_group=next_group, next_batch=next_batch, fresh=fresh)


def at_work(groups: int = 3, n: int = 1) -> Stage:
    """A trainer `first`, and everything it submitted assigned to one engine."""
    stage = Stage()
    stage.engine("a", max_running=64)
    stage.trainer(hello("first"))
    stage.submit(groups, n)
    return stage


def complete(stage: Stage, *samples: str) -> None:
    for sample in samples:
        stage.tokens("a", stage.number(sample), [5, 2], "stop")
        stage.score(sample)


def groups_of(batch: Batch) -> list[int]:
    return list(dict.fromkeys(scored.group for scored in batch.samples))


def nothing_is_broken(stage: Stage) -> None:
    """The audit of the same events agrees with the state and with the invariants."""
    projection, audit = HistoryProjection(LedgerState(stage.ledger.state.config)), Audit()
    for event in stage.events:
        for entry in projection.project(event):
            audit.take(entry)
    assert [verdict.first for verdict in audit.conclude(stage.ledger.state) if verdict.broken] == []


def test_a_dead_trainers_request_takes_no_batch_from_its_successor() -> None:
    stage = at_work()
    stage.ask(least=3)
    stage.trainer(hello("second"))
    assert stage.ledger.state.pending == {}
    complete(stage, "0.0", "1.0", "2.0")
    assert not stage.ledger.state.batches
    (batch,) = sent(stage.ask(), Batch)
    assert groups_of(batch) == [0, 1, 2]
    nothing_is_broken(stage)


def test_what_was_packed_and_not_acknowledged_is_offered_again_in_its_order() -> None:
    stage = at_work(4)
    complete(stage, "1.0", "0.0", "3.0")
    asked = [sent(stage.ask(most=1), Batch)[0] for _ in range(3)]
    stage.acknowledge(asked[0].number)
    complete(stage, "2.0")
    stage.trainer(hello("second"))
    assert not stage.ledger.state.batches
    (batch,) = sent(stage.ask(least=3), Batch)
    assert groups_of(batch) == [0, 3, 2]
    assert batch.last
    assert sent(stage.acknowledge(asked[1].number), Accepted)
    assert stage.ledger.status(stage.now).samples.acknowledged == 1
    stage.acknowledge(batch.number)
    assert stage.ledger.status(stage.now).samples.acknowledged == 4
    nothing_is_broken(stage)


def test_what_was_trained_before_comes_in_the_same_parts_whatever_least_is_asked_for() -> None:
    """Another division would give other sums; the audit knows such a batch from one that is short."""
    stage = Stage()
    stage.engine("a", max_running=64)
    stage.trainer(replace(hello("first"), covers=True))
    stage.submit(3)
    complete(stage, "0.0")
    stage.acknowledge(sent(stage.ask(), Batch)[0].number)
    stage.trainer(replace(hello("second"), covers=True))
    assert [groups_of(batch) for batch in sent(stage.ask(least=2), Batch)] == [[0]]
    nothing_is_broken(stage)


def test_what_its_state_contains_is_not_offered_again() -> None:
    stage = at_work()
    complete(stage, "0.0", "1.0")
    batches = [sent(stage.ask(most=1), Batch)[0].number for _ in range(2)]
    stage.trainer(hello("second", acknowledged=batches[0]))
    assert stage.ledger.status(stage.now).samples.acknowledged == 1
    assert [groups_of(batch) for batch in sent(stage.ask(most=1), Batch)] == [[1]]


def test_the_same_trainer_that_comes_back_finds_all_as_it_was() -> None:
    stage = at_work()
    complete(stage, "0.0")
    (batch,) = sent(stage.ask(), Batch)
    stage.ask(least=2)
    outcome = stage.trainer(hello("first", next_group=3, next_batch=1))
    assert sent(outcome, TrainerWelcome)[0].held == ()
    assert list(stage.ledger.state.batches) == [batch.number]
    assert len(stage.ledger.state.pending) == 1


def test_a_new_trainer_gets_what_is_held_and_a_request_for_every_open_verdict() -> None:
    stage = at_work(2, n=2)
    stage.tokens("a", stage.number("0.0"), [5, 2], "stop")
    complete(stage, "1.0")
    stage.trainer(hello("second", fresh=True))
    outcome = stage.trainer(hello("second", fresh=True))  # the first answer was lost with its connection
    (welcome,) = sent(outcome, TrainerWelcome)
    assert (welcome.next_group, welcome.version, welcome.manifest_hash) == (2, 0, b"hash")
    assert [(held.id, held.scored, held.turn) for held in welcome.held] == [(0, 0, 0), (1, 1, 0)]
    assert sent(outcome, TurnsAwaited) == [TurnsAwaited((("0.0", 0),))]
    (turn,) = sent(stage.trainer(Fetch(1, ("0.0",))), TurnDone)
    assert (turn.response.sample, turn.start) == ("0.0", 0)
    groups = [stage.ledger.state.groups[number].group for number in (0, 1)]
    assert [held.digest for held in welcome.held] == [group_digest(group) for group in groups]


def test_a_replaced_trainer_is_fenced_for_good_also_by_a_restarted_manager() -> None:
    stage = at_work()
    stage.trainer(hello("second"))
    stage.ledger = Ledger(LedgerConfig(run_epoch=1), decode_state(encode_state(stage.ledger.state)))
    outcome = stage.trainer(hello("first"))
    assert [fenced.reason for fenced in sent(outcome, Fenced)] == ["another trainer has taken this one's place"]
    assert stage.ledger.state.trainer == "second"
    assert sent(stage.trainer(hello("second")), TrainerWelcome)


def test_a_fresh_journal_takes_no_number_that_its_trainer_knows() -> None:
    stage = Stage()
    stage.engine("a")
    (welcome,) = sent(stage.trainer(hello("first", next_group=5, next_batch=3)), TrainerWelcome)
    assert welcome.next_group == 5
    assert sent(stage.trainer(Acknowledge(901, 2)), Accepted)
    assert sent(stage.score("4.0"), Accepted)
    stage.submit(6)
    assert sorted(stage.ledger.state.groups) == [5]
    complete(stage, "5.0")
    assert sent(stage.ask(), Batch)[0].number == 3
    nothing_is_broken(stage)


def test_a_fresh_journal_takes_no_assignment_that_an_agent_holds() -> None:
    stage = Stage()
    held = (HeldAssignment(7, "0.0", attempt=1, length=12), HeldAssignment(2**31, "0.1", attempt=1, length=12))
    outcome = stage.agent(
        "a", Hello(1, "a", pool=Pool.SPOT, max_running=8, kv_tokens=1000, max_context=100, weight_version=0, held=held)
    )
    assert [cancel.assignment for cancel in sent(outcome, Cancel)] == [7, 2**31]
    assert [assign.assignment for assign in sent(stage.submit(max_new_tokens=5), Assign)] == [8]
    nothing_is_broken(stage)


def test_what_an_engine_holds_is_settled_before_it_is_welcome() -> None:
    """For it sends all that it holds as soon as it is: what came twice would count as generated twice."""
    stage = Stage()
    stage.engine("a")
    stage.submit(2)
    numbers = [stage.number(sample) for sample in stage.placed()["a"]]
    stage.tokens("a", numbers[0], [5] * 4)
    stage.tokens("a", numbers[1], [5] * 4 + [2], "stop")
    stage._keep(stage.ledger.resume(stage.now + 1.0))
    held = tuple(HeldAssignment(number, "", attempt=1, length=5) for number in numbers)
    outcome = stage.agent(
        "a", Hello(1, "a", pool=Pool.SPOT, max_running=8, kv_tokens=1000, max_context=100, weight_version=0, held=held)
    )
    answers = sent(outcome, (Resend, Cancel, Welcome))
    assert answers[:2] == [Resend(numbers[0], 4), Cancel(numbers[1])]
    assert isinstance(answers[-1], Welcome)


def test_the_same_weights_may_be_published_again_at_another_place_and_no_others() -> None:
    stage = at_work()
    stage.engine("b", version=-1)
    outcome = stage.trainer(
        PublishVersion(900, 0, endpoint="tcp://elsewhere", public_key="key2", manifest_hash=b"hash")
    )
    assert sent(outcome, Accepted)
    assert {announce.endpoint for announce in sent(outcome, Announce)} == {"tcp://elsewhere"}
    assert sent(
        stage.trainer(PublishVersion(902, 0, endpoint="tcp://elsewhere", public_key="key2", manifest_hash=b"other")),
        Declined,
    )


def test_a_live_number_is_not_given_to_another_prompt() -> None:
    stage = at_work()
    known = stage.ledger.state.groups[1].group
    assert sent(stage.trainer(Submit(900, (known,))), Accepted)
    (refused,) = sent(stage.submit(id=1, prompt_ids=b"\1\0\0\0"), Declined)
    assert "group 1 was submitted before" in refused.reason


@pytest.mark.parametrize("listens", [True, False])
def test_a_verdict_that_never_comes_has_a_deadline_as_long_as_the_trainer_lives(listens: bool) -> None:
    stage = Stage(LedgerConfig(run_epoch=1, verdict_deadline_s=100.0))
    stage.engine("a")
    stage.trainer(hello("first"))
    stage.submit(n=2)
    for index in range(2):
        stage.tokens("a", stage.number(f"0.{index}"), [5, 2], "stop")
    dropped: list[GroupDropped] = []
    for _ in range(200):
        if listens:
            stage.trainer(TrainerHeartbeat())
        dropped += sent(stage.pass_time(1.0), GroupDropped)
    assert [drop.reason for drop in dropped] == ([DiscardReason.REWARD_TIMED_OUT] if listens else [])
    if listens:
        assert "no verdict on turn 0" in dropped[0].detail
        assert stage.ledger.status(stage.now).samples.discarded == {"rewardTimedOut": 1, "groupIncomplete": 1}
    nothing_is_broken(stage)


def held_through_a_restart() -> Stage:
    """The manager has come back; of two engines alike, `a` has greeted and sent the end of all that it ran; the other
    one has greeted with two samples, of which it holds more than the journal has."""
    stage = Stage()
    for name in "ab":
        stage.engine(name)
    stage.submit(4)
    for _ in range(20):
        stage.now += 0.1
        for number, assignment in tuple(stage.ledger.state.assignments.items()):
            stage.tokens(assignment.engine, number, [5])
    stage.now += 0.9
    stage._keep(stage.ledger.resume(stage.now))
    greetings: dict[str, list[HeldAssignment]] = {"a": [], "b": []}
    for number, assignment in stage.ledger.state.assignments.items():
        greetings[assignment.engine].append(HeldAssignment(number, assignment.sample, attempt=1, length=90))
    for name, held in greetings.items():
        stage.now += 0.01
        stage.agent(
            name,
            Hello(
                1,
                name,
                pool=Pool.SPOT,
                max_running=8,
                kv_tokens=100_000,
                max_context=4096,
                weight_version=0,
                held=tuple(held),
            ),
        )
        stage.ledger.state.engines["b"].step_scale = 1.0  # far slower, for all that was measured
    return stage


def test_what_an_engine_holds_is_not_generated_elsewhere_before_it_has_come() -> None:
    stage = held_through_a_restart()
    for held in tuple(stage.placed()["a"]):
        stage.tokens("a", stage.number(held), [5] * 70 + [2], "stop")
    stage.pass_time(0.01)
    assert len(stage.placed()["b"]) == 2
    stage.pass_time_heard(6.0)
    stage.give_back()
    assert len(stage.placed()["a"]) == 2, "but it is not waited for longer than that"


def test_what_has_piled_up_is_no_speed() -> None:
    stage = held_through_a_restart()
    before = stage.ledger.state.engines["a"].step_scale
    for held in tuple(stage.placed()["a"]):
        stage.tokens("a", stage.number(held), [5] * 70)
    assert stage.ledger.state.engines["a"].step_scale == before
