"""The audit: honest records pass, whatever happened; each kind of broken record is caught, by its own invariant."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import pytest

from polyrl.ledger import Ledger, LedgerConfig, ledger
from polyrl.ledger.audit import records as r
from polyrl.ledger.audit.audit import Audit
from polyrl.ledger.audit.findings import TITLES, Verdict
from polyrl.ledger.audit.history import Historian
from polyrl.ledger.scheduling import placement, reserved
from polyrl.ledger.state import LedgerState
from polyrl.sample import DiscardReason, Finish, Pool, Purpose
from polyrl.wire import Deregister, ReservedWindow
from polyrl_rollout.testing.simulation import Violation, draw_schedule, run_schedule
from polyrl_rollout.testing.simulation.manager import SimulatedManager
from polyrl_rollout.testing.simulation.stage import Stage

COUNT = int(os.environ.get("POLYRL_SCHEDULES", "40"))
MUTANT_SCHEDULES = 100

Records = list[r.AnyRecord]
R = TypeVar("R", bound=r.Record)


def judged(records: Sequence[r.AnyRecord], state: LedgerState | None) -> dict[str, Verdict]:
    audit = Audit()
    for record in records:
        audit.take(r.decode_record(r.encode_record(record)))
    return {verdict.invariant: verdict for verdict in audit.conclude(state)}


def broken(records: Sequence[r.AnyRecord], state: LedgerState | None) -> dict[str, str]:
    return {name: verdict.first for name, verdict in judged(records, state).items() if verdict.broken}


def a_run() -> tuple[Records, LedgerState]:
    """Group 0 (0.0, 0.1) is trained, after 0.0 moved from a silent engine; group 1 is discarded; group 2 lives."""
    stage = Stage()
    stage.engine("a", max_running=1)
    stage.engine("b", max_running=1)
    stage.submit(n=2, max_new_tokens=4)
    stage.ask(least=2, most=2)
    stage.tokens("a", stage.number("0.0"), [5, 6])
    for _ in range(4):  # seconds in which only b is heard
        stage.tokens("b", 0, [])
        stage.pass_time(1.0)
    stage.engine("c", max_running=4)
    stage.tokens("b", stage.number("0.1"), [5, 2], "stop")
    stage.score("0.1")
    engine = stage.ledger.state.assignments[stage.number("0.0")].engine
    stage.tokens(engine, stage.number("0.0"), [7, 8])
    stage.score("0.0", reward=0.5)
    stage.acknowledge(0)
    stage.submit(n=2)
    stage.reject("1.0")
    stage.submit(n=1)
    stage.tokens("c" if stage.placed()["c"] else "b", stage.number("2.0"), [5])
    historian = Historian(Ledger(LedgerConfig(run_epoch=1)).state)
    told: Records = [r.Began(0.0, 0.0, stage.ledger.state.config)]
    for event in stage.events:
        told.extend(historian.tell(event))
    return told, stage.ledger.state


def a_windowed_run() -> tuple[Records, LedgerState]:
    """Group 0 begins on a reserved engine, which hands it over to a spot engine; group 1 has none but the reserved."""
    stage = Stage()
    stage.engine("reserved-0", Pool.RESERVED, max_running=2)
    stage.submit(n=2, max_new_tokens=20)
    for _ in range(6):
        stage.now += 0.5
        for name in ("0.0", "0.1"):
            stage.tokens("reserved-0", stage.number(name), [5])
    stage.engine("spot-0")
    stage.trainer(ReservedWindow(stage.request(), False))
    stage.finish_all()
    stage.trainer(ReservedWindow(stage.request(), True))
    stage.agent("spot-0", Deregister("told"))
    stage.submit(n=1, max_new_tokens=20)
    stage.now += 0.5
    stage.tokens("reserved-0", stage.number("1.0"), [5])
    stage.trainer(ReservedWindow(stage.request(), False))
    stage.now += 0.5
    stage.finish_all()
    historian = Historian(Ledger(LedgerConfig(run_epoch=1)).state)
    told: Records = [r.Began(0.0, 0.0, stage.ledger.state.config)]
    for event in stage.events:
        told.extend(historian.tell(event))
    return told, stage.ledger.state


RUN, STATE = a_run()
WINDOWED, WINDOWED_STATE = a_windowed_run()


def first(kind: type[R], **events: Any) -> R:
    """The first record of a kind of which `events` are true."""
    return next(
        record
        for record in RUN
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in events.items())
    )


def without(*gone: r.Record) -> Records:
    return [record for record in RUN if record not in gone]


def instead(record: r.Record, **changes: Any) -> Records:
    return [msgspec.structs.replace(one, **changes) if one is record else one for one in RUN]


def after(record: r.Record, *more: r.AnyRecord) -> Records:
    at = next(index for index, one in enumerate(RUN) if one is record) + 1
    return [*RUN[:at], *more, *RUN[at:]]


SUBMITTED = first(r.Submitted, group=0)
MOVED = first(r.Moved)
ENDED = first(r.TurnEnded, sample="0.0")
SCORED = first(r.Scored, sample="0.1")
COMPLETED = first(r.Completed)
BATCHED = first(r.Batched)
ACKNOWLEDGED = first(r.Acknowledged)
DISCARDED = first(r.Discarded)
GONE = first(r.Gone)
AGAIN = first(r.Assigned, sample="0.0", engine=ENDED.engine)
LAST = RUN[-1]
SERVING = first(r.Serving, engine=AGAIN.engine)


def test_the_honest_run_holds_and_shows_every_invariant_but_the_windows() -> None:
    verdicts = judged(RUN, STATE)
    assert not broken(RUN, STATE)
    assert list(verdicts) == list(TITLES)
    assert [name for name, verdict in verdicts.items() if not verdict.looked] == ["I9"]
    assert verdicts["I1"].looked == {"samples": 5, "ends": 2}
    assert MOVED.pieces == [(0, 2, 0)]
    assert ENDED.pieces == [(2, 4, 0)]


BROKEN: list[tuple[str, str, Callable[[], Records]]] = [
    ("I1", "submitted twice", lambda: after(SUBMITTED, SUBMITTED)),
    ("I1", "was acknowledged before", lambda: after(ACKNOWLEDGED, r.Discarded(99.0, 0, "", DiscardReason.STALE, ""))),
    ("I1", "was discarded before", lambda: after(DISCARDED, DISCARDED)),
    ("I1", "never submitted", lambda: after(SUBMITTED, r.Scored(1.0, "77.0", 1.0, {}))),
    ("I1", "have not, group 2 first", lambda: after(LAST, r.Finished(99.0, True, ""))),
    ("I2", "without a verdict on its samples [1]", lambda: without(SCORED)),
    ("I2", "which is not complete", lambda: without(COMPLETED)),
    ("I2", "at most 1 were asked for", lambda: instead(BATCHED, min_samples=1, max_samples=1)),
    ("I2", "at least 3 were asked for", lambda: instead(BATCHED, min_samples=3, max_samples=3, last=False)),
    ("I2", "holds group 0 of 0 (train)", lambda: instead(BATCHED, step=1)),
    ("I2", "holds group 0 of 0 (train)", lambda: instead(BATCHED, purpose=Purpose.EVAL)),
    ("I2", "is in the batches 0 and 1", lambda: after(BATCHED, msgspec.structs.replace(BATCHED, batch=1))),
    ("I2", "names two batches", lambda: after(ACKNOWLEDGED, msgspec.structs.replace(BATCHED, groups=[]))),
    ("I2", "is scored while it is waiting", lambda: after(SUBMITTED, r.Scored(1.0, "0.0", 1.0, {}))),
    ("I3", "acknowledged or cancelled before", lambda: after(ACKNOWLEDGED, ACKNOWLEDGED)),
    ("I3", "was never packed", lambda: after(SUBMITTED, r.Acknowledged(1.0, 5))),
    ("I4", "has 2 tokens, and 1 to 4 come", lambda: instead(ENDED, pieces=[(1, 4, 0)])),
    ("I4", "has 2 tokens, and 3 to 4 come", lambda: instead(ENDED, pieces=[(3, 4, 0)])),
    ("I4", "has 5 generated tokens of 4", lambda: instead(ENDED, pieces=[(2, 5, 0)])),
    ("I4", "for length after 3 of 4 tokens", lambda: instead(ENDED, pieces=[(2, 3, 0)], finish=Finish.LENGTH)),
    ("I4", "is assigned while it is turnDone", lambda: after(ENDED, r.Assigned(9.0, "0.0", 90, ENDED.engine, 0))),
    ("I4", "names two assignments", lambda: instead(AGAIN, assignment=1)),
    ("I4", "but none runs", lambda: after(ENDED, msgspec.structs.replace(ENDED, pieces=[]))),
    ("I4", "which does not run", lambda: after(ENDED, r.Stray(9.0, ENDED.assignment, 3))),
    ("I4", "is discarded while its samples", lambda: without(first(r.Cut))),
    ("I5", "after its deadline", lambda: instead(BATCHED, due=BATCHED.at - 3.0)),
    ("I5", "has no deadline", lambda: after(LAST, r.Unanswered(9.0, 7, 1.0, float("inf")))),
    ("I6", "it may use 0 to 0", lambda: instead(ENDED, pieces=[(2, 4, 1)])),
    ("I6", "which serves version 3", lambda: instead(AGAIN, version=3)),
    ("I6", "which had not verified it", lambda: without(SERVING)),
    ("I7", "no lease of it runs", lambda: without(first(r.Greeted, engine=AGAIN.engine))),
    ("I7", "still running there", lambda: without(MOVED)),
    ("I7", "drains and is given", lambda: after(SERVING, r.Draining(SERVING.at, SERVING.engine, "told", 9.0))),
    ("I7", "takes 1 at once and is given", lambda: after(AGAIN, r.Assigned(9.0, "0.0", 90, "b", 0))),
    ("I7", "its lease is 3 s", lambda: instead(GONE, heard_at=GONE.at - 1.0)),
    ("I7", "which is no cause", lambda: instead(GONE, cause="boredom")),
    ("I8", "of silence; its lease is 3 s", lambda: instead(GONE, heard_at=GONE.at - 30.0)),
    ("I10", "live groups", lambda: without(DISCARDED)),
    ("I10", "samples acknowledged", lambda: without(ACKNOWLEDGED)),
    ("I10", "tokens accepted", lambda: instead(ENDED, pieces=[(2, 3, 0)], finish=Finish.STOP)),
    ("I10", "records tell waiting", lambda: without(first(r.Assigned, sample="2.0"))),
    ("I10", "newest assignment", lambda: after(LAST, r.Assigned(9.0, "2.0", 90, "b", 0))),
]


@pytest.mark.parametrize(("invariant", "words", "records"), BROKEN, ids=[f"{i}: {words}" for i, words, _ in BROKEN])
def test_a_broken_record_is_caught_by_its_invariant(invariant: str, words: str, records: Callable[[], Records]) -> None:
    changed = records()
    assert changed != RUN
    found = broken(changed, STATE)
    assert invariant in found, found
    assert found[invariant].startswith("at ")
    if words not in found[invariant]:
        # The first finding may be another one of the same record; alone it must say the words.
        assert any(words in text for text in all_findings(changed, invariant)), found


def all_findings(records: Records, invariant: str) -> list[str]:
    texts: list[str] = []
    audit = Audit()
    honest = audit.findings.broke

    def broke(name: str, at: float, text: str) -> None:
        honest(name, at, text)
        if name == invariant:
            texts.append(text)

    audit.findings.broke = broke  # type: ignore[method-assign]
    for record in records:
        audit.take(record)
    audit.conclude(STATE)
    return texts


def test_every_invariant_that_a_journal_shows_has_its_broken_record() -> None:
    caught = {invariant for invariant, _, _ in BROKEN} | {"I9", "I11"}
    assert caught == TITLES.keys()


def test_an_honest_window_is_bounded_by_the_work_left() -> None:
    verdict = judged(WINDOWED, WINDOWED_STATE)["I9"]
    assert not broken(WINDOWED, WINDOWED_STATE)
    shown = {"reserved assignments": 3, "windows": 2, "windows at a measured speed": 2, "handed over": 2}
    assert verdict.looked == shown


def closed(record: r.Record) -> bool:
    return isinstance(record, r.Window) and not record.open


def later(record: r.AnyRecord, seconds: float, since: float) -> r.AnyRecord:
    return msgspec.structs.replace(record, at=record.at + seconds) if record.at >= since else record


def window_held_open() -> Records:
    """Its 40 tokens and two prompts take 20.4 s at half a second each; twice that and 30 s is the bound."""
    end = next(record.at for record in WINDOWED if closed(record))
    return [later(record, 75.0, end) for record in WINDOWED]


def kept_outside() -> Records:
    """The hand-over comes half a second after the window's end."""
    at = next(number for number, record in enumerate(WINDOWED) if closed(record)) + 1
    return WINDOWED[:at] + [later(record, 0.5, 0.0) for record in WINDOWED[at:]]


def given_outside() -> Records:
    """The samples that the window's end took from the reserved engine go back to it."""
    changed = list(WINDOWED)
    for number, record in enumerate(changed):
        if isinstance(record, r.Assigned) and record.engine == "spot-0":
            changed[number] = msgspec.structs.replace(record, engine="reserved-0")
    return changed


def handed_to_nobody() -> Records:
    """The second window ends, and its sample leaves although the spot engine has gone."""
    at = max(number for number, record in enumerate(WINDOWED) if closed(record)) + 1
    move = r.Moved(WINDOWED[at - 1].at, "1.0", 5, "reserved-0", [(0, 1, 0)], "window")
    return [*WINDOWED[:at], move, *WINDOWED[at:]]


def handed_over_too_early() -> Records:
    return [record for record in WINDOWED if not closed(record)]


WINDOWS: list[tuple[str, Callable[[], Records]]] = [
    ("of a window whose 40 tokens take", window_held_open),
    ("has kept sample 0.0 for 0.500 s outside the window", kept_outside),
    ("is given sample 0.0 outside the window", given_outside),
    ("and no other engine can go on with it", handed_to_nobody),
    ("while the window is open", handed_over_too_early),
]


@pytest.mark.parametrize(("words", "records"), WINDOWS, ids=[words for words, _ in WINDOWS])
def test_a_window_beyond_the_work_left_is_caught(words: str, records: Callable[[], Records]) -> None:
    changed = records()
    assert changed != WINDOWED
    assert words in broken(changed, None)["I9"]


def test_a_window_without_a_measured_speed_is_not_said_to_be_timed() -> None:
    changed = [msgspec.structs.replace(x, token_s=0.0) if isinstance(x, r.Window) else x for x in window_held_open()]
    verdict = judged(changed, None)["I9"]
    assert not verdict.broken
    assert "windows at a measured speed" not in verdict.looked


@pytest.mark.parametrize(("factor", "words"), [(100.0, "too many"), (0.1, "too few")])
def test_bytes_that_do_not_fit_their_tokens(factor: float, words: str) -> None:
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(STATE), type=LedgerState)
    state.counters.delta_bytes = int(factor * state.counters.delta_bytes)
    assert words in broken(RUN, state)["I11"]


class Recorder:
    """Tells the records of a simulated run, as its manager's journal would."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.records: Records = []
        self.ledger = Ledger(LedgerConfig(run_epoch=1))
        keep, restart = SimulatedManager.keep, SimulatedManager.restart

        def keeping(manager: SimulatedManager, events: Any, now: float) -> None:
            if manager.ledger is not self.ledger:
                self.ledger = manager.ledger
                self.historian = Historian(Ledger(manager.ledger.state.config).state)
                self.records.append(r.Began(manager.clock(now), now, manager.ledger.state.config))
            for event in events:
                self.records.extend(self.historian.tell(event))
            keep(manager, events, now)

        def restarting(manager: SimulatedManager, now: float) -> None:
            restart(manager, now)
            self.ledger, self.historian = manager.ledger, Historian(manager.ledger.state)
            self.records.append(r.Began(manager.clock(now), now, manager.ledger.state.config))

        patch.setattr(SimulatedManager, "keep", keeping)
        patch.setattr(SimulatedManager, "restart", restarting)


def no_hand_over(patch: pytest.MonkeyPatch) -> None:
    """What reserved engines run when the window closes stays there."""
    patch.setattr(ledger, "hand_over", lambda d: None)


def window_ignored(patch: pytest.MonkeyPatch) -> None:
    """Reserved engines get work whether the window is open or not."""
    patch.setattr(placement, "may_generate", lambda state, engine, low, high, now: reserved.serves(engine, low, high))


def handed_over_blindly(patch: pytest.MonkeyPatch) -> None:
    """A closing window empties reserved engines whether others can go on or not."""
    patch.setattr(reserved, "_others_can", lambda state, low, high, now: True)


LEDGERS = [(no_hand_over, "has kept"), (window_ignored, "outside the window"), (handed_over_blindly, "no other engine")]


@pytest.mark.parametrize(("mutant", "words"), LEDGERS, ids=[mutant.__name__ for mutant, _ in LEDGERS])
def test_a_ledger_that_breaks_the_window_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    mutant(monkeypatch)
    for number in range(MUTANT_SCHEDULES):
        recorder.records.clear()
        with contextlib.suppress(Violation):  # a mutant may also starve the run
            run_schedule(draw_schedule(number))
        if words in broken(recorder.records, None).get("I9", ""):
            return
    pytest.fail(f"I9 did not notice {mutant.__name__} in {MUTANT_SCHEDULES} schedules")


@pytest.mark.slow
def test_runs_under_random_faults_are_called_sound(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    recorder = Recorder(monkeypatch)
    shown: set[str] = set()
    for number in range(seed, seed + COUNT):
        recorder.records.clear()
        run_schedule(draw_schedule(number))
        verdicts = judged(recorder.records, recorder.ledger.state)
        wrong = {name: verdict.first for name, verdict in verdicts.items() if verdict.broken}
        assert not wrong, f"python -m polyrl_rollout.testing.simulation {number}"
        shown |= {name for name, verdict in verdicts.items() if verdict.looked}
    assert shown == TITLES.keys()
