"""The rule by which a trainer that is asked to stop saves, awaits a save, or leaves, row by row."""

from __future__ import annotations

import pytest

from polyrl.checkpoints.last_save import (
    MEASURED_SAVES,
    MIB,
    MeasuredSave,
    SaveAction,
    SaveDecision,
    SavePace,
    decide_save,
)

UNKNOWN = SavePace()
EIGHT = SavePace((MeasuredSave(100 * MIB, 8.0),))
"""Seconds for 100 MiB."""

ROWS = {
    "nobody asked": (None, 100, EIGHT, {}, SaveAction.BEGIN),
    "nobody asked, one in flight": (None, 100, EIGHT, {"in_flight": True}, SaveAction.AWAIT),
    "nobody asked, saved already": (None, 100, EIGHT, {"unchanged": True}, SaveAction.NOTHING),
    "speed not known": (1.0, 100, UNKNOWN, {}, SaveAction.BEGIN),
    "speed not known, no time": (-1.0, 100, UNKNOWN, {}, SaveAction.BEGIN),
    "just in time": (10.0, 100, EIGHT, {}, SaveAction.BEGIN),
    "just too late": (9.9, 100, EIGHT, {}, SaveAction.LEAVE),
    "a third of the bytes": (9.9, 33, EIGHT, {}, SaveAction.BEGIN),
    "three times the bytes, with the first moments": (29.9, 300, EIGHT, {}, SaveAction.LEAVE),
    "over": (-1.0, 100, EIGHT, {}, SaveAction.LEAVE),
    "one in flight counts": (9.9, 100, EIGHT, {"in_flight": True}, SaveAction.AWAIT),
    "one in flight counts when all is over": (-1.0, 100, EIGHT, {"in_flight": True}, SaveAction.AWAIT),
    "saved already": (-1.0, 100, EIGHT, {"unchanged": True}, SaveAction.NOTHING),
}


@pytest.mark.parametrize(("left", "size", "pace", "more", "action"), ROWS.values(), ids=ROWS)
def test_what_is_done(left: float | None, size: int, pace: SavePace, more: dict[str, bool], action: SaveAction) -> None:
    decision = decide_save(left, size * MIB, pace, **more)
    assert decision.action is action
    assert bool(decision.why) is (action is SaveAction.LEAVE), "what stays unsaved has its reason"


def test_the_reason_has_its_numbers() -> None:
    why = "a save of 100.0 MiB takes 8.0 s, and 9.0 s were left"
    assert decide_save(9.0, 100 * MIB, EIGHT) == SaveDecision(SaveAction.LEAVE, why)
    assert decide_save(-3.0, 100 * MIB, EIGHT).why.endswith("and 0.0 s were left")


def test_the_slowest_of_the_last_saves_counts() -> None:
    pace = UNKNOWN
    for seconds in (9.0, 1.0, 2.0):
        pace = pace.after(MeasuredSave(10, seconds))
    assert pace.seconds(20) == pytest.approx(18.0)
    assert pace.after(MeasuredSave(10, 1.0)).seconds(20) == pytest.approx(4.0), "the first is forgotten"
    assert len(pace.after(MeasuredSave(10, 1.0)).saves) == MEASURED_SAVES
    assert UNKNOWN.after(MeasuredSave(0, 1.0)).seconds(5) is not None, "of an empty save"
