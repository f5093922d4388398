"""Which messages wait for the disk, and in which order they leave."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import get_args

from polyrl.ledger import Effects, Event
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.events import Moved
from polyrl.ledger.journal.durability import NEEDS, TRAINER_PEER, Outbox, Safety
from polyrl.sample import Finish, Purpose, Response
from polyrl.wire import (
    Accepted,
    Cancel,
    Fetched,
    GoToSleep,
    Peers,
    Recall,
    Resend,
    ToAgent,
    TokensKept,
    ToTrainer,
    TrainerHeartbeat,
    TurnDone,
    TurnsAwaited,
    VersionServed,
    WakeUp,
    Welcome,
)

RESPONSE = Response("0.0", turn=0, ids=b"", logprobs=b"", loss_mask=b"", spans=(), finish=Finish.STOP)
TURN_DONE = TurnDone(0, 0, purpose=Purpose.TRAIN, step=0, response=RESPONSE)
WELCOME = Welcome(1, 3.0, beat_s=1.0, delta_s=0.1)


MOVED = Moved(1, MoveCause.REBALANCED, at=0.0)


def effects(
    to_agents: Sequence[tuple[str, ToAgent]] = (), to_trainer: Sequence[ToTrainer] = (), *events: Event
) -> Effects:
    made = Effects()
    made.events, made.to_agents, made.to_trainer = list(events), list(to_agents), list(to_trainer)
    return made


def taken(outbox: Outbox, synced: int) -> tuple[list[tuple[str, ToAgent]], list[ToTrainer]]:
    ready = outbox.take(synced)
    return ready.to_agents, ready.to_trainer


def test_of_each_message_it_is_decided_what_it_waits_for() -> None:
    assert set(NEEDS) == {*get_args(ToAgent), *get_args(ToTrainer)}


def test_only_signs_of_life_and_what_a_greeting_settles_leave_before_the_disk_has_it() -> None:
    early = {kind for kind, needs in NEEDS.items() if needs is Safety.COMMITTED}
    orders = {Recall, GoToSleep, WakeUp}
    assert early == {Welcome, Peers, Resend, TurnsAwaited, Fetched, TrainerHeartbeat, VersionServed} | orders


def test_a_promise_waits_until_its_commit_is_synced() -> None:
    outbox = Outbox()
    outbox.put(3, effects([("a", Cancel(7))], [Accepted(1)]))
    assert taken(outbox, 2) == ([], [])
    assert outbox.waits
    assert taken(outbox, 3) == ([("a", Cancel(7))], [Accepted(1)])
    assert not outbox.waits


def test_tokens_alone_cost_no_sync() -> None:
    """An agent holds what it sent of a sample to the sample's end."""
    outbox = Outbox()
    outbox.put(3, effects([("a", TokensKept(7)), ("a", Recall(1))], []))
    assert taken(outbox, 0) == ([("a", Recall(1)), ("a", TokensKept(7))], [])
    assert not outbox.waits


def test_a_receipt_waits_with_the_promise_of_its_own_commit_and_with_older_ones() -> None:
    """With the end of a turn the agent forgets it; the promise that goes with it is the trainer's."""
    outbox = Outbox()
    outbox.put(3, effects([("a", TokensKept(7))], [TURN_DONE]))
    outbox.put(4, effects([("a", TokensKept(8)), ("b", TokensKept(1))], []))
    assert taken(outbox, 2) == ([], [])
    outbox.put(5, effects([], [Accepted(1)]))
    assert taken(outbox, 3) == ([("a", TokensKept(7))], [TURN_DONE])
    assert taken(outbox, 4) == ([("a", TokensKept(8)), ("b", TokensKept(1))], []), "though another promise waits"


def test_a_receipt_waits_where_an_assignment_has_ended() -> None:
    """Though nobody is promised anything: the agent forgets what it generated."""
    outbox = Outbox()
    outbox.put(3, effects([("a", TokensKept(7))], [], MOVED))
    outbox.put(4, effects([("a", TokensKept(8))]))
    assert taken(outbox, 2) == ([], [])
    assert outbox.waits
    assert taken(outbox, 3) == ([("a", TokensKept(7))], [])


def test_nothing_overtakes_a_promise_to_the_same_peer() -> None:
    outbox = Outbox()
    outbox.put(3, effects([("a", Cancel(1)), ("a", WELCOME), ("b", WELCOME)], [Accepted(1), TrainerHeartbeat()]))
    assert taken(outbox, 2) == ([("b", WELCOME)], [])
    assert taken(outbox, 3) == ([("a", Cancel(1)), ("a", WELCOME)], [Accepted(1), TrainerHeartbeat()])


def test_what_rests_on_synced_commits_alone_leaves_at_once() -> None:
    outbox = Outbox()
    outbox.put(0, effects([("a", Cancel(1))], []))
    assert taken(outbox, 0) == ([("a", Cancel(1))], [])


def test_whatever_happens_all_leaves_once_in_order_per_peer_and_no_promise_too_early() -> None:
    for seed in range(50):
        random, outbox = Random(seed), Outbox()
        sent: dict[str, list[object]] = {}
        left: dict[str, list[object]] = {}
        rests_on: dict[int, int] = {}
        synced = 0
        for commit in range(1, 60):
            number = random.randrange(10**6)
            peer, message = random.choice(
                (
                    ("a", Cancel(number)),
                    ("a", Resend(number, 0)),
                    ("b", TokensKept(number)),
                    ("b", Resend(number, 0)),
                    (TRAINER_PEER, Accepted(number)),
                    (TRAINER_PEER, TrainerHeartbeat()),
                )
            )
            sent.setdefault(peer, []).append(message)
            rests_on[id(message)] = commit
            if isinstance(message, Accepted | TrainerHeartbeat):
                outbox.put(commit, effects([], [message]))
            else:
                outbox.put(commit, effects([(peer, message)], []))
            synced = random.choice((synced, synced, commit))
            to_agents, to_trainer = taken(outbox, synced)
            for name, one in [*to_agents, *((TRAINER_PEER, one) for one in to_trainer)]:
                assert NEEDS[type(one)] is not Safety.SYNCED or rests_on[id(one)] <= synced
                left.setdefault(name, []).append(one)
        to_agents, to_trainer = taken(outbox, 10**6)
        for name, one in [*to_agents, *((TRAINER_PEER, one) for one in to_trainer)]:
            left.setdefault(name, []).append(one)
        assert not outbox.waits
        for peer in sent:
            for kind in (TokensKept, None):
                of_kind = [
                    [m for m in box[peer] if isinstance(m, TokensKept) == (kind is TokensKept)] for box in (sent, left)
                ]
                assert of_kind[0] == of_kind[1]
