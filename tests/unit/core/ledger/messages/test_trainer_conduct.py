"""What other people's loops may do: acknowledge in any order, take no answer, reuse a number, open two steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyrl.ledger import LedgerConfig
from polyrl.ledger.apply.samples import ENDED_MEMORY
from polyrl.sample import Pool, Purpose
from polyrl.wire import (
    Accepted,
    Assign,
    Batch,
    Covered,
    Declined,
    EndStep,
    FinishRun,
    GroupDropped,
    NoticesTaken,
    TrainerHello,
    TrainerWelcome,
    Withdraw,
    pack_ids,
)
from polyrl_rollout.testing.stage import Stage, sent


def ready(count: int = 1, **fields: Any) -> Stage:
    """Groups of one sample each, scored."""
    stage = Stage()
    stage.engine("a", max_running=64)
    stage.submit(count, **fields)
    stage.finish_all()
    return stage


def groups_of(batch: Batch) -> list[int]:
    return [scored.group for scored in batch.samples]


# --- acknowledgements -------------------------------------------------------------------------------------------------


def test_a_batch_that_was_passed_over_is_not_acknowledged_by_a_greeting() -> None:
    stage = ready(3)
    for _ in range(3):
        stage.ask(most=1)
    stage.acknowledge(1)
    stage.trainer(TrainerHello(1, -1, acknowledged_above=((1, 2),)))
    assert list(stage.ledger.state.batches) == [0, 2]
    stage.trainer(TrainerHello(1, 0, trainer="successor", acknowledged_above=((2, 3),)))
    assert stage.ledger.status(0.0).samples.acknowledged == 3


def test_a_successor_gets_what_was_delivered_in_the_order_in_which_it_was() -> None:
    """Another order would be another division into micro-batches, and the short answers came first."""
    stage = ready(5)
    for _ in range(2):
        stage.ask(most=2)
    stage.trainer(TrainerHello(1, -1, trainer="successor"))
    (batch,) = sent(stage.ask(), Batch)
    assert groups_of(batch) == [0, 1, 2, 3, 4]


# --- withdrawals ------------------------------------------------------------------------------------------------------


def test_a_request_that_is_withdrawn_takes_nothing_whether_it_was_answered_or_not() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.ask(request=70)
    assert sent(stage.trainer(Withdraw(stage.request(), 70)), Accepted)
    stage.finish_all()
    (batch,) = sent(stage.ask(request=71), Batch)
    assert groups_of(batch) == [0]
    assert sent(stage.trainer(Withdraw(stage.request(), 71)), Accepted)
    (again,) = sent(stage.ask(request=72), Batch)
    assert groups_of(again) == [0]
    assert again.number > batch.number
    assert sent(stage.trainer(Withdraw(stage.request(), 71)), Accepted)
    assert list(stage.ledger.state.batches) == [again.number], "a repetition touches no other request"


def test_what_is_withdrawn_after_its_step_has_ended_is_surplus() -> None:
    stage = ready()
    stage.ask(request=70)
    stage.trainer(EndStep(stage.request(), 0, purpose=Purpose.TRAIN))
    stage.trainer(Withdraw(stage.request(), 70))
    assert stage.ledger.status(0.0).samples.discarded == {"surplus": 1}
    assert not stage.ledger.state.steps


def test_what_is_withdrawn_is_not_learned() -> None:
    """The trainer's own engines idled until it asked again, and learning was measured as if it took no time."""
    stage = Stage()
    stage.engine("own", Pool.RESERVED)
    stage.engine("spot")
    stage.submit(8)
    stage.finish_all()
    learner = stage.ledger.state.learner
    learner.token_s = 0.5
    stage.ask(most=4)
    stage.ask(most=4, request=70)
    stage.trainer(Withdraw(stage.request(), 70))
    assert not stage.ledger.state.window_open, "it learns the other one"
    assert learner.tokens == 0, "as much as it was given since it asked last, and kept"
    stage.trainer(Withdraw(stage.request(), stage.ledger.state.batches[0].request.request))
    assert stage.ledger.state.window_open
    stage.now += 0.1
    stage.ask(most=4)
    assert learner.token_s == 0.5


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_used_number_is_another_groups_for_ever() -> None:
    stage = ready()
    stage.ask()
    stage.acknowledge(0)
    stage._group = 0
    assert sent(stage.submit(), Accepted), "the same group repeated"
    stage._group = 0
    (refused,) = sent(stage.submit(prompt_ids=pack_ids([1])), Declined)
    assert refused.reason == "group 0 was submitted before, as another one; numbers from 1 on are free"


def test_of_the_oldest_numbers_only_that_they_are_used_is_remembered() -> None:
    stage = ready(2)
    state = stage.ledger.state
    stage.reject("0.0")
    stage.reject("1.0")
    assert list(state.ended) == [0, 1]
    del state.ended[0]
    stage._group = 0
    (refused,) = sent(stage.submit(), Declined)
    assert refused.reason == "group 0 has ended long ago; numbers from 2 on are free"
    state.ended.update({number: b"" for number in range(-ENDED_MEMORY, 0)})
    stage._group = 2
    stage.submit()
    stage.reject("2.0")
    assert len(state.ended) == ENDED_MEMORY + 1, "one goes as one comes"


def test_what_a_lost_journal_held_is_repeated_without_effect() -> None:
    stage = Stage()
    stage.trainer(TrainerHello(1, -1, next_group=5))
    assert sent(stage.submit(3), Accepted)
    assert not stage.ledger.state.groups


# --- two open steps ---------------------------------------------------------------------------------------------------


def test_a_replacement_for_the_awaited_step_goes_before_what_is_ahead() -> None:
    stage = Stage()
    stage.submit(2, step=1)
    stage.submit(3, step=2)
    stage.submit(1, step=1)
    outcome = stage.engine("a", max_running=3)
    assert {assign.sample for assign in sent(outcome, Assign)} == {"0.0", "1.0", "5.0"}


class _Counted(list[GroupDropped]):
    """How many of it were read."""

    read = 0

    def __iter__(self) -> Iterator[GroupDropped]:
        for one in super().__iter__():
            _Counted.read += 1
            yield one


def test_of_thousands_of_notices_each_is_taken_without_reading_the_others() -> None:
    """Of 16,384 groups that became stale at once the manager worked for 12 s to hear that each was known."""
    stage = Stage()
    stage.takes_notices = False
    stage.submit(count=100)
    for group in range(100):
        stage.reject(f"{group}.0")
    (step,) = stage.ledger.state.steps.values()
    _Counted.read = 0
    for group in (*range(50), 99, *range(50, 99)):
        step.notices = step.notices if isinstance(step.notices, _Counted) else _Counted(step.notices)
        stage.trainer(NoticesTaken((group, group)))
    assert step.notices == []
    assert _Counted.read < 400


def test_a_notice_is_repeated_until_it_is_taken_also_when_a_later_step_is_open() -> None:
    stage = Stage()
    stage.takes_notices = False
    stage.submit(1, step=1)
    stage.reject("0.0")
    stage.submit(1, step=2)
    assert not sent(stage.ask(step=1, request=70), Batch), "nothing more will come: but it does not know why"
    assert [one.group for one in sent(stage.trainer(TrainerHello(1, -1)), GroupDropped)] == [0]
    (batch,) = sent(stage.trainer(NoticesTaken((0,))), Batch)
    assert (batch.samples, batch.last) == ((), True)
    assert not sent(stage.trainer(TrainerHello(1, -1)), GroupDropped)
    assert not sent(stage.trainer(NoticesTaken((0, 7))), Batch)


def test_only_its_end_forgets_a_step() -> None:
    stage = ready(1, step=1)
    stage.submit(1, step=2)
    stage.ask(step=1)
    stage.acknowledge(0)
    assert [step.step for step in stage.ledger.state.steps.values()] == [1, 2]
    stage.trainer(EndStep(stage.request(), 1, purpose=Purpose.TRAIN))
    assert [step.step for step in stage.ledger.state.steps.values()] == [2]
    stage.submit(1, step=1)
    assert stage.ledger.state.steps["train/1"].open == 1, "a step may begin again"


# --- acknowledged, and in no checkpoint yet ---------------------------------------------------------------------------


def trained(batches: int = 2, **config: Any) -> Stage:
    """Batches of one group each of 12 tokens, acknowledged by a trainer that has saved nothing."""
    stage = Stage(LedgerConfig(run_epoch=1, **config))
    stage.trainer(TrainerHello(1, -1, trainer="first", covers=True))
    stage.engine("a", max_running=64)
    stage.submit(batches)
    stage.finish_all()
    for number in range(batches):
        stage.ask(most=1)
        stage.acknowledge(number)
    return stage


def test_what_no_checkpoint_contains_is_handed_out_again_in_the_same_batches_without_an_engine() -> None:
    stage = trained(3)
    stage.trainer(EndStep(stage.request(), 0, purpose=Purpose.TRAIN))
    tokens = stage.ledger.state.counters.tokens_accepted
    assert stage.ledger.status(0.0).samples.open == 0
    assert stage.ledger.state.backlog == 0
    stage.trainer(Covered(stage.request(), ((0, 1),)))
    hello = TrainerHello(1, -1, trainer="second", fresh=True, acknowledged_above=((0, 1),), covers=True)
    (welcome,) = sent(stage.trainer(hello), TrainerWelcome)
    assert [(one.id, one.complete) for one in welcome.held] == [(1, True), (2, True)]
    assert stage.ledger.status(0.0).samples.acknowledged == 1
    assert stage.ledger.status(0.0).samples.offered_again == 2
    again = [sent(stage.ask(most=64), Batch)[0] for _ in range(2)]
    assert [groups_of(batch) for batch in again] == [[1], [2]], "as they were divided before"
    for batch in again:
        stage.acknowledge(batch.number)
    stage.trainer(Covered(stage.request(), ((0, 99),)))
    state = stage.ledger.state
    assert (state.kept, state.kept_tokens, state.groups, state.samples, state.backlog) == ({}, 0, {}, {}, 0)
    assert state.counters.tokens_accepted == tokens


def test_a_former_batch_that_exceeds_what_is_wanted_is_divided_anew() -> None:
    stage = ready(2)
    stage.trainer(TrainerHello(1, -1, trainer="first", covers=True))
    (batch,) = sent(stage.ask(most=2), Batch)
    stage.acknowledge(batch.number)
    stage.trainer(TrainerHello(1, -1, trainer="second", covers=True))
    assert [groups_of(sent(stage.ask(most=1), Batch)[0]) for _ in range(2)] == [[0], [1]]


def test_too_much_is_released_early_the_oldest_first_and_counted() -> None:
    stage = trained(3, kept_tokens=30)
    assert list(stage.ledger.state.kept) == [1, 2]
    assert stage.ledger.status(0.0).samples.released_early == 1


def test_a_trainer_that_saves_nothing_leaves_nothing() -> None:
    stage = ready()
    stage.ask()
    stage.acknowledge(0)
    assert not stage.ledger.state.groups


def test_the_end_of_the_run_releases_what_was_trained() -> None:
    stage = trained()
    stage.trainer(FinishRun(800, True, message="done"))
    assert stage.ledger.status(0.0).samples.acknowledged == 2
    assert not stage.ledger.state.groups


def test_a_verdict_on_what_was_trained_is_moot() -> None:
    stage = trained(1)
    assert sent(stage.reject("0.0"), Accepted)
    assert sent(stage.score("0.0"), Accepted)
    assert stage.ledger.status(0.0).samples.acknowledged == 1
