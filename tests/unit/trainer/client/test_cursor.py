"""What a trainer knows of its run, and what of it is lost with the manager's journal."""

from __future__ import annotations

import pytest

from polyrl.sample import DiscardReason, Group, Purpose, SamplingParams
from polyrl.wire import PublishVersion, TrainerWelcome
from polyrl_trainer.client.conversation import Cursor

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
