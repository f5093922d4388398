"""The audit: honest records pass, whatever happened; each kind of broken record is caught, by its own invariant."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import pytest

from polyrl.ledger import Ledger, LedgerConfig
from polyrl.ledger import records as r
from polyrl.ledger.audit import Audit
from polyrl.ledger.audit_findings import TITLES, Verdict
from polyrl.ledger.history import Historian
from polyrl.ledger.state import State
from polyrl.sample import DiscardReason, Finish, Purpose
from polyrl.simulation import draw_schedule, run_schedule
from polyrl.simulation.manager import SimulatedManager
from polyrl.simulation.stage import Stage

COUNT = int(os.environ.get("POLYRL_SCHEDULES", "40"))

Records = list[r.AnyRecord]
R = TypeVar("R", bound=r.Record)


def judged(records: Sequence[r.AnyRecord], state: State | None) -> dict[str, Verdict]:
    audit = Audit()
    for record in records:
        audit.take(r.decode_record(r.encode_record(record)))
    return {verdict.invariant: verdict for verdict in audit.conclude(state)}


def broken(records: Sequence[r.AnyRecord], state: State | None) -> dict[str, str]:
    return {name: verdict.first for name, verdict in judged(records, state).items() if verdict.broken}


def a_run() -> tuple[Records, State]:
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
    historian = Historian(Ledger(LedgerConfig(epoch=1)).state)
    told: Records = [r.Began(0.0, 0.0, stage.ledger.state.config)]
    for fact in stage.facts:
        told.extend(historian.tell(fact))
    return told, stage.ledger.state


RUN, STATE = a_run()


def first(kind: type[R], **facts: Any) -> R:
    """The first record of a kind of which `facts` are true."""
    return next(
        record
        for record in RUN
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in facts.items())
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


def test_the_honest_run_holds_and_shows_every_invariant_but_one() -> None:
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
    caught = {invariant for invariant, _, _ in BROKEN} | {"I11"}
    assert caught == TITLES.keys() - {"I9"}


@pytest.mark.parametrize(("factor", "words"), [(100.0, "too many"), (0.1, "too few")])
def test_bytes_that_do_not_fit_their_tokens(factor: float, words: str) -> None:
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(STATE), type=State)
    state.counters.delta_bytes = int(factor * state.counters.delta_bytes)
    assert words in broken(RUN, state)["I11"]


class Recorder:
    """Tells the records of a simulated run, as its manager's journal would."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.records: Records = []
        self.ledger = Ledger(LedgerConfig(epoch=1))
        keep, restart = SimulatedManager.keep, SimulatedManager.restart

        def keeping(manager: SimulatedManager, facts: Any, now: float) -> None:
            if manager.ledger is not self.ledger:
                self.ledger = manager.ledger
                self.historian = Historian(Ledger(manager.ledger.state.config).state)
                self.records.append(r.Began(manager.clock(now), now, manager.ledger.state.config))
            for fact in facts:
                self.records.extend(self.historian.tell(fact))
            keep(manager, facts, now)

        def restarting(manager: SimulatedManager, now: float) -> None:
            restart(manager, now)
            self.ledger, self.historian = manager.ledger, Historian(manager.ledger.state)
            self.records.append(r.Began(manager.clock(now), now, manager.ledger.state.config))

        patch.setattr(SimulatedManager, "keep", keeping)
        patch.setattr(SimulatedManager, "restart", restarting)


def test_runs_under_random_faults_are_called_sound(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    recorder = Recorder(monkeypatch)
    shown: set[str] = set()
    for number in range(seed, seed + COUNT):
        recorder.records.clear()
        run_schedule(draw_schedule(number))
        verdicts = judged(recorder.records, recorder.ledger.state)
        wrong = {name: verdict.first for name, verdict in verdicts.items() if verdict.broken}
        assert not wrong, f"python -m polyrl.simulation {number}"
        shown |= {name for name, verdict in verdicts.items() if verdict.looked}
    assert shown == TITLES.keys() - {"I9"}
