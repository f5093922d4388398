"""What a trainer knows of its run, and what of it is lost with the manager's journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from polyrl import wire
from polyrl.keys import TrainerKeys
from polyrl.sample import DiscardReason, Group, Purpose, SamplingParams
from polyrl.wire import PublishVersion, TrainerWelcome
from polyrl_trainer.client.client import RolloutClient
from polyrl_trainer.client.conversation import Cursor, RequestRefused

GROUPS = [
    Group(
        number, 0, purpose=Purpose.TRAIN, prompt_ids=bytes(4), n=1, sampling=SamplingParams(8),
        min_version=0, max_version=0,
    )
    for number in range(6)
]  # fmt: skip
VERSION = PublishVersion(1, 3, endpoint="tcp://publisher", public_key="key", manifest_hash=b"hash")


def welcome(journal: str) -> TrainerWelcome:
    return TrainerWelcome(1, 15.0, beat_s=1.0, journal=journal, next_group=0, version=-1, manifest_hash=b"", held=())


def lost(cursor: Cursor, journal: str) -> list[int]:
    other = journal != cursor.journal
    drops, again = cursor.reconcile(welcome(journal))
    assert all(drop.reason is DiscardReason.JOURNAL_LOST for drop in drops)
    assert again == ([VERSION] if other else [])
    return [drop.group for drop in drops]


def cursor_with_six_groups() -> Cursor:
    cursor = Cursor()
    cursor.reconcile(welcome("first"))
    cursor.announce(VERSION)
    cursor.submit(GROUPS)
    return cursor


def test_the_same_journal_has_lost_nothing() -> None:
    cursor = cursor_with_six_groups()
    cursor.accept(GROUPS)
    assert lost(cursor, "first") == []


@pytest.mark.parametrize(
    ("accepted", "turn_of", "gone"),
    [
        pytest.param(0, None, [], id="no answer yet, so the submission is repeated"),
        pytest.param(4, None, [0, 1, 2, 3], id="accepted in part"),
        pytest.param(0, 2, [0, 1, 2], id="no answer, but a turn of it has ended"),
        pytest.param(4, 1, [0, 1, 2, 3], id="both"),
    ],
)
def test_another_journal_has_lost_what_the_one_before_had(accepted: int, turn_of: int | None, gone: list[int]) -> None:
    cursor = cursor_with_six_groups()
    cursor.accept(GROUPS[:accepted])
    if turn_of is not None:
        cursor.turn_ended(turn_of)
    assert lost(cursor, "second") == gone
    assert lost(cursor, "third") == []


KEYS = TrainerKeys("p" * 40, "s" * 40, manager_public_key="m" * 40, agent_public_key="a" * 40)
OTHERS = [replace(group, step=1) for group in GROUPS]


async def submit(client: RolloutClient, groups: Sequence[Group], *answers: str) -> None:
    """One answer for each part that is sent, in order: the reason of a refusal, or nothing."""
    sent: list[wire.FromTrainer] = []
    client._requests._send = sent.append
    submission = asyncio.create_task(client.submit(groups))
    for answer in answers:
        await asyncio.sleep(0)
        request = sent.pop().request  # type: ignore[union-attr]
        client._handle(wire.Declined(request, answer) if answer else wire.Accepted(request))
    await submission


def lost_after(*happened: tuple[Sequence[Group], tuple[str, ...]] | int) -> list[tuple[int, int]]:
    """Number and step of what is lost with the journal after these submissions, each with its answers, and the ends of
    these steps."""

    async def run() -> list[tuple[int, int]]:
        client = RolloutClient("tcp://127.0.0.1:1", KEYS, 1, [], max_manager_outage_s=60.0)
        client._cursor.reconcile(welcome("first"))
        for what in happened:
            if isinstance(what, int):
                client._cursor.end_step(what, Purpose.TRAIN)
                continue
            with contextlib.nullcontext() if what[1][-1] == "" else pytest.raises(RequestRefused):
                await submit(client, what[0], *what[1])
        await client._link.close(0)
        return [(drop.group, drop.step) for drop in client._cursor.reconcile(welcome("second"))[0]]

    return asyncio.run(run())


ACCEPTED, REFUSED = (GROUPS[:2], ("",)), (OTHERS[:1], ("number 0 is taken",))


def test_a_refused_submission_takes_no_number_from_the_group_that_has_it() -> None:
    assert lost_after(ACCEPTED, REFUSED) == [(0, 0), (1, 0)]
    assert lost_after(ACCEPTED, REFUSED, 1) == [(0, 0), (1, 0)]


def test_what_was_refused_is_not_lost() -> None:
    assert lost_after(ACCEPTED, 0, REFUSED) == []


def test_of_a_submission_in_parts_those_before_the_refused_one_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SUBMIT_BYTES", 8)  # two of these prompts
    # Number 5 is accepted last, so that the numbers of what was never sent count as taken.
    assert lost_after((GROUPS[:5], ("", "no room")), (GROUPS[5:], ("",))) == [(0, 0), (1, 0), (5, 0)]
