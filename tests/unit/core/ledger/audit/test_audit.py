"""The audit: an honest history passes, whatever happened; each kind of broken one is caught, by its own invariant."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from polyrl.ledger import Ledger, LedgerConfig, events as f, ledger
from polyrl.ledger.audit import history
from polyrl.ledger.audit.audit import Audit
from polyrl.ledger.audit.findings import TITLES, Verdict
from polyrl.ledger.audit.history import AssignmentTokens, HistoryEntry, HistoryEvent, HistoryProjection, ManagerStarted
from polyrl.ledger.scheduling import cost, placement
from polyrl.ledger.state import LedgerState
from polyrl.sample import DiscardReason, Finish, Pool, Purpose
from polyrl.wire import Deregister, pack_ids
from polyrl_rollout.testing.simulation import Violation, draw_schedule, run_schedule
from polyrl_rollout.testing.stage import Stage

COUNT = int(os.environ.get("POLYRL_SCHEDULES", "40"))
MUTANT_SCHEDULES = 100

Entries = list[HistoryEntry]


def audited(entries: Sequence[HistoryEntry], state: LedgerState | None) -> dict[str, Verdict]:
    audit = Audit()
    for number, entry in enumerate(entries):
        audit.take(history.decode_entry(number, history.encode_entry(number, entry)))
    return {verdict.invariant: verdict for verdict in audit.conclude(state)}


def broken(entries: Sequence[HistoryEntry], state: LedgerState | None) -> dict[str, str]:
    return {name: verdict.first for name, verdict in audited(entries, state).items() if verdict.broken}


def history_of(stage: Stage) -> Entries:
    """What a journal would keep."""
    projection = HistoryProjection(Ledger(LedgerConfig(run_epoch=1)).state)
    started = HistoryEntry(0.0, ManagerStarted(0.0, stage.ledger.state.config))
    return [started, *(entry for event in stage.events for entry in projection.project(event))]


def a_run() -> tuple[Entries, LedgerState]:
    """Group 0 (0.0, 0.1) is trained, after 0.0 moved from a silent engine; group 1 is discarded; group 2 lives."""
    stage = Stage()
    stage.engine("a", max_running=1)
    stage.engine("b", max_running=1)
    stage.submit(n=2, max_new_tokens=4)
    stage.ask(least=2, most=2)
    stage.tokens("a", stage.number("0.0"), [5, 6])
    for _ in range(16):  # seconds in which only b is heard
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
    return history_of(stage), stage.ledger.state


def a_windowed_run() -> tuple[Entries, LedgerState]:
    """A reserved engine generates group 0, which the trainer learns while a spot engine generates group 1; then the
    spot engine has gone, and group 2 has none but the reserved."""
    stage = Stage()
    stage.engine("reserved-0", Pool.RESERVED, max_running=2)
    stage.submit(n=2, max_new_tokens=20)
    for _ in range(6):
        stage.now += 0.5
        for name in ("0.0", "0.1"):
            stage.tokens("reserved-0", stage.number(name), [5])
    stage.finish_all()
    stage.ask()
    stage.engine("spot-0")
    stage.submit(n=2, max_new_tokens=20)
    stage.finish_all()
    stage.acknowledge(0)
    stage.agent("spot-0", Deregister("drained"))
    stage.submit(n=1, max_new_tokens=20)
    stage.now += 0.5
    stage.tokens("reserved-0", stage.number("2.0"), [5])
    stage.finish_all()
    stage.ask()
    return history_of(stage), stage.ledger.state


RUN, STATE = a_run()
WINDOWED, WINDOWED_STATE = a_windowed_run()


def first(kind: type, **fields: Any) -> HistoryEntry:
    """The first entry of a kind of event with these fields."""
    return next(
        entry
        for entry in RUN
        if isinstance(entry.event, kind) and all(getattr(entry.event, name) == value for name, value in fields.items())
    )


def without(gone: HistoryEntry) -> Entries:
    return [entry for entry in RUN if entry is not gone]


def changed(entry: HistoryEntry, **changes: Any) -> HistoryEntry:
    """The same entry of a changed event."""
    return msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, **changes))


def instead(entry: HistoryEntry, **changes: Any) -> Entries:
    return [changed(one, **changes) if one is entry else one for one in RUN]


def after(entry: HistoryEntry, *more: HistoryEvent | HistoryEntry) -> Entries:
    """The run with further events after an entry, at its time."""
    at = next(index for index, one in enumerate(RUN) if one is entry) + 1
    added = [one if isinstance(one, HistoryEntry) else HistoryEntry(entry.at, one) for one in more]
    return [*RUN[:at], *added, *RUN[at:]]


def asked(**changes: Any) -> Entries:
    """Another request answered by the batch of the run."""
    return instead(BATCHED, wanted=msgspec.structs.replace(BATCHED.event.wanted, **changes))


def requested_at(at: float) -> Entries:
    """Its deadline of 60 s passes at another time."""
    return [msgspec.structs.replace(one, at=at) if one is REQUESTED else one for one in RUN]


def tokens(*pieces: history.Piece, finish: Finish | None = None) -> Entries:
    """Other tokens of the last assignment of sample 0.0; and, if asked for, another end."""
    entries = instead(TOKENS, pieces=list(pieces))
    return entries if finish is None else [changed(one, finish=finish) if one is ENDED else one for one in entries]


SUBMITTED = RUN[next(i for i, one in enumerate(RUN) if isinstance(one.event, f.GroupSubmitted))]
MOVED = first(f.Moved)
ENDED = first(f.TurnEnded, sample="0.0")
AGAIN = next(one for one in reversed(RUN) if isinstance(one.event, f.Assigned) and one.event.sample == "0.0")
ENGINE, NUMBER = AGAIN.event.engine, AGAIN.event.assignment
MOVED_TOKENS, TOKENS = first(AssignmentTokens), first(AssignmentTokens, assignment=NUMBER)
SCORED = first(f.SampleScored, sample="0.1")
COMPLETED = first(f.GroupCompleted)
BATCHED = first(f.BatchPacked)
REQUESTED = first(f.BatchRequested)
ACKNOWLEDGED = first(f.BatchAcknowledged)
DISCARDED = first(f.GroupDiscarded)
SILENT = first(f.EngineSilent)
SILENT_HEARD, HEARD = (one for one in RUN if isinstance(one.event, f.EngineHeard))
GONE = first(f.EngineGone)
LAST = RUN[-1]
SERVING = first(f.EngineServing, engine=ENGINE)


def assigned(number: int, sample: str, engine: str) -> f.Assigned:
    return f.Assigned(number, sample, engine=engine, kv=1, at=9.0)


def test_the_honest_run_holds_and_shows_every_invariant() -> None:
    verdicts = audited(RUN, STATE)
    assert not broken(RUN, STATE)
    assert list(verdicts) == list(TITLES)
    assert all(verdict.examined for verdict in verdicts.values())
    assert verdicts["I1"].examined == {"samples": 5, "ends": 2}
    assert MOVED_TOKENS.event.pieces == [(0, 2, 0)]
    assert TOKENS.event.pieces == [(2, 4, 0)]


def test_the_history_holds_no_token() -> None:
    """Neither of a prompt, nor of a response, nor of an environment."""
    stage = Stage()
    stage.engine("a")
    stage.submit(n=1, prompt_ids=pack_ids([70_001] * 3))
    stage.tokens("a", stage.number("0.0"), [70_001, 2], "stop")
    stage.extend("0.0", [70_001])
    entries = history_of(stage)
    assert not any(pack_ids([70_001]) in history.encode_entry(1, entry) for entry in entries)
    assert [entry.tokens for entry in entries if isinstance(entry.event, f.GroupSubmitted)] == [3]
    assert [entry.tokens for entry in entries if isinstance(entry.event, f.TurnExtended)] == [1]
    assert [entry.event.pieces for entry in entries if isinstance(entry.event, AssignmentTokens)] == [[(0, 2, 0)]]


def discarded(group: int) -> f.GroupDiscarded:
    return f.GroupDiscarded(group, "", reason=DiscardReason.STALE, detail="", notify=False, at=99.0)


def endless() -> f.BatchRequested:
    request = msgspec.structs.replace(REQUESTED.event.wanted, request=7, deadline_s=float("inf"))
    return f.BatchRequested(request, 9.0)


BROKEN: list[tuple[str, str, Callable[[], Entries]]] = [
    ("I1", "submitted twice", lambda: after(SUBMITTED, SUBMITTED)),
    ("I1", "was acknowledged before", lambda: after(ACKNOWLEDGED, discarded(0))),
    ("I1", "was discarded before", lambda: after(DISCARDED, DISCARDED)),
    ("I1", "never submitted", lambda: after(SUBMITTED, f.SampleScored("77.0", 1.0, metrics={}, at=1.0))),
    ("I1", "have not, group 2 first", lambda: after(LAST, f.RunFinished(ok=True, message="", at=99.0))),
    ("I2", "without a verdict on its samples [1]", lambda: without(SCORED)),
    ("I2", "which is not complete", lambda: without(COMPLETED)),
    ("I3", "at most 1 were asked for", lambda: asked(min_samples=1, max_samples=1)),
    (
        "I2",
        "at least 3 were asked for",
        lambda: [
            changed(one, last=False) if isinstance(one.event, f.BatchPacked) else one
            for one in asked(min_samples=3, max_samples=3)
        ],
    ),
    ("I2", "holds group 0 of 0 (train)", lambda: asked(step=1)),
    ("I2", "holds group 0 of 0 (train)", lambda: asked(purpose=Purpose.EVAL)),
    ("I2", "is in the batches 0 and 1", lambda: after(BATCHED, changed(BATCHED, batch=1))),
    ("I2", "names two batches", lambda: after(ACKNOWLEDGED, changed(BATCHED, groups=[]))),
    ("I2", "is scored while it is waiting", lambda: after(SUBMITTED, f.SampleScored("0.0", 1.0, metrics={}, at=1.0))),
    ("I3", "acknowledged or cancelled before", lambda: after(ACKNOWLEDGED, ACKNOWLEDGED)),
    ("I3", "was never packed", lambda: after(SUBMITTED, f.BatchAcknowledged(5, 1.0))),
    ("I4", "has 2 tokens, and 1 to 4 come", lambda: tokens((1, 4, 0))),
    ("I4", "has 2 tokens, and 3 to 4 come", lambda: tokens((3, 4, 0))),
    ("I4", "has 5 generated tokens of 4", lambda: tokens((2, 5, 0))),
    (
        "I4",
        "for length after 3 of 4 tokens, and engines have room for more than its",
        lambda: tokens((2, 3, 0), finish=Finish.LENGTH),
    ),
    ("I4", "is assigned while it is turnDone", lambda: after(ENDED, assigned(90, "0.0", ENGINE))),
    ("I4", "names two assignments", lambda: instead(AGAIN, assignment=1)),
    ("I4", "ends while it is turnDone", lambda: after(ENDED, ENDED)),
    ("I4", "ends, but it does not run", lambda: after(MOVED, MOVED)),
    ("I4", "which does not run", lambda: after(ENDED, AssignmentTokens(NUMBER, [(4, 7, 0)]))),
    (
        "I5",
        "after its deadline",
        lambda: requested_at(BATCHED.at - 63.0),
    ),
    ("I5", "has no deadline", lambda: after(LAST, endless(), f.BatchRequestClosed(7))),
    ("I5", "has no deadline", lambda: after(LAST, f.BatchRequestClosed(7))),
    ("I6", "it may use 0 to 0", lambda: tokens((2, 4, 1))),
    ("I6", "which serves version 3", lambda: after(SERVING, f.EngineServing(ENGINE, 3, at=9.0))),
    ("I6", "which had not verified it", lambda: without(SERVING)),
    ("I7", "no lease of it runs", lambda: without(first(f.EngineGreeted, engine=ENGINE))),
    ("I7", "still running there", lambda: without(MOVED)),
    (
        "I7",
        "drains and is given",
        lambda: after(SERVING, f.EngineDraining(ENGINE, 9.0, reason="test", at=SERVING.at)),
    ),
    ("I7", "takes 1 at once and is given", lambda: after(AGAIN, assigned(90, "0.0", "b"))),
    ("I7", "leaves after 1.000 s without a sign, before 15 s", lambda: instead(HEARD, at=GONE.at - 1.0)),
    ("I7", "falls silent after 1.000 s without a sign, before 3 s", lambda: instead(SILENT_HEARD, at=SILENT.at - 1.0)),
    ("I7", "is silent and is given", lambda: after(SILENT, assigned(90, "0.0", "a"))),
    ("I7", "falls silent, but no lease of it runs", lambda: after(SILENT, f.EngineSilent("z", SILENT.at))),
    ("I8", "falls silent after 30.000 s without a sign, due", lambda: instead(SILENT_HEARD, at=SILENT.at - 30.0)),
    ("I7", "which is no cause", lambda: instead(GONE, cause="boredom")),
    ("I8", "leaves after 30.000 s without a sign, due after 15 s", lambda: instead(HEARD, at=GONE.at - 30.0)),
    ("I10", "live groups", lambda: without(DISCARDED)),
    ("I10", "samples acknowledged", lambda: without(ACKNOWLEDGED)),
    ("I10", "tokens accepted", lambda: tokens((2, 3, 0), finish=Finish.STOP)),
    ("I10", "tokens accepted", lambda: without(TOKENS)),
    ("I10", "the history shows waiting", lambda: without(first(f.Assigned, sample="2.0"))),
    ("I10", "newest assignment", lambda: after(LAST, assigned(90, "2.0", "b"))),
]


@pytest.mark.parametrize(("invariant", "words", "entries"), BROKEN, ids=[f"{i}: {words}" for i, words, _ in BROKEN])
def test_a_broken_history_is_caught_by_its_invariant(
    invariant: str, words: str, entries: Callable[[], Entries]
) -> None:
    altered = entries()
    assert altered != RUN
    found = broken(altered, STATE)
    assert invariant in found, found
    assert found[invariant].startswith("at ")
    if words not in found[invariant]:
        # The first finding may be another one of the same event; alone it must say the words.
        assert any(words in text for text in all_findings(altered, invariant)), found


def all_findings(entries: Entries, invariant: str) -> list[str]:
    texts: list[str] = []
    audit = Audit()
    honest = audit.findings.broke

    def broke(name: str, at: float, text: str) -> None:
        honest(name, at, text)
        if name == invariant:
            texts.append(text)

    audit.findings.broke = broke  # type: ignore[method-assign]
    for entry in entries:
        audit.take(entry)
    audit.conclude(STATE)
    return texts


def test_every_invariant_that_a_journal_shows_has_its_broken_history() -> None:
    caught = {invariant for invariant, _, _ in BROKEN} | {"I9", "I11"}
    assert caught == TITLES.keys()


def test_an_honest_window_is_bounded_by_the_work_left() -> None:
    verdict = audited(WINDOWED, WINDOWED_STATE)["I9"]
    assert not broken(WINDOWED, WINDOWED_STATE)
    shown = {"reserved assignments": 3, "windows": 2, "windows at a measured speed": 2}
    assert verdict.examined == shown


def closes(entry: HistoryEntry) -> bool:
    return isinstance(entry.event, f.WindowSet) and not entry.event.open


def later(entry: HistoryEntry, seconds: float, since: float) -> HistoryEntry:
    return msgspec.structs.replace(entry, at=entry.at + seconds) if entry.at >= since else entry


def window_held_open() -> Entries:
    """Its 40 tokens and two prompts take 20 to 27 s, as half a second each is measured from frames of one sample; twice
    that and 30 s is the bound."""
    end = next(entry.at for entry in WINDOWED if closes(entry))
    return [later(entry, 90.0, end) for entry in WINDOWED]


def given_outside() -> Entries:
    """What the spot engine got while the trainer learned goes to the reserved engine."""
    moved_to = [one for one in WINDOWED if isinstance(one.event, f.Assigned) and one.event.engine == "spot-0"]
    return [changed(entry, engine="reserved-0") if entry in moved_to else entry for entry in WINDOWED]


def learned_beside() -> Entries:
    """The reserved engine could sleep, and the batches were to be learned alone."""
    entries = [changed(one, sleeps=True) if isinstance(one.event, f.EngineGreeted) else one for one in WINDOWED]
    alone = [one.event.wanted for one in entries if isinstance(one.event, f.BatchPacked)]
    wanted = {one: msgspec.structs.replace(one, alone=True) for one in alone}
    return [
        changed(one, wanted=wanted[one.event.wanted]) if isinstance(one.event, f.BatchPacked) else one
        for one in entries
    ]


WINDOWS: list[tuple[str, Callable[[], Entries]]] = [
    ("of a window whose 40 tokens take", window_held_open),
    ("is given sample 1.0 outside the window", given_outside),
    ("needs the devices alone, and reserved-0 held memory there", learned_beside),
]


@pytest.mark.parametrize(("words", "entries"), WINDOWS, ids=[words for words, _ in WINDOWS])
def test_a_window_beyond_the_work_left_is_caught(words: str, entries: Callable[[], Entries]) -> None:
    altered = entries()
    assert altered != WINDOWED
    assert words in broken(altered, None)["I9"]


def test_a_window_without_a_measured_speed_is_not_said_to_be_timed() -> None:
    altered = [
        changed(entry, token_s=0.0) if isinstance(entry.event, f.WindowSet) else entry for entry in window_held_open()
    ]
    verdict = audited(altered, None)["I9"]
    assert not verdict.broken
    assert "windows at a measured speed" not in verdict.examined


@pytest.mark.parametrize(
    ("factor", "words"), [pytest.param(100.0, "too many", id="too many"), pytest.param(0.1, "too few", id="too few")]
)
def test_bytes_that_do_not_fit_their_tokens(factor: float, words: str) -> None:
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(STATE), type=LedgerState)
    state.counters.delta_bytes = int(factor * state.counters.delta_bytes)
    assert words in broken(RUN, state)["I11"]


def awake_beside_learner(patch: pytest.MonkeyPatch) -> None:
    """A batch that needs the devices alone does not wait for anybody to sleep."""
    patch.setattr(ledger, "awaits_sleep", lambda transition, wanted: False)


def window_ignored(patch: pytest.MonkeyPatch) -> None:
    """Reserved engines get work whether the window is open or not."""
    patch.setattr(placement, "may_generate", lambda transition, engine, low, high: cost.serves(engine, low, high))


LEDGERS = [(window_ignored, "outside the window"), (awake_beside_learner, "while ['e0'] are awake")]


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "words"), LEDGERS, ids=[mutant.__name__ for mutant, _ in LEDGERS])
def test_a_ledger_that_breaks_the_window_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    for number in range(MUTANT_SCHEDULES):
        try:
            run_schedule(draw_schedule(number))
        except Violation as violation:  # a mutant may also starve the run
            if violation.invariant == "I9" and words in str(violation):
                return
    pytest.fail(f"I9 did not notice {mutant.__name__} in {MUTANT_SCHEDULES} schedules")


@pytest.mark.slow
def test_random_schedules_show_every_invariant(seed: int) -> None:
    shown: set[str] = set()
    for number in range(seed, seed + COUNT):
        shown |= run_schedule(draw_schedule(number)).shown
        if shown == TITLES.keys():
            return
    pytest.fail(f"{COUNT} schedules show {sorted(shown)} of {sorted(TITLES)}")


def claiming(entry: HistoryEntry, number: int, n: int) -> HistoryEntry:
    """An entry of a submitted group that claims so many samples."""
    assert isinstance(entry.event, f.GroupSubmitted)
    return changed(entry, group=msgspec.structs.replace(entry.event.group, id=number, n=n))


def test_a_group_of_any_number_of_samples_takes_no_memory_and_no_time() -> None:
    """A received history of a hundred bytes filled all memory."""
    group = claiming(first(f.GroupSubmitted), 77, 2**40)
    found = broken([RUN[0], group, HistoryEntry(group.at, f.GroupCompleted(77, group.at))], STATE)
    assert "group 77 is called complete without a verdict on its samples [0, 1, 2]" in found["I2"]


def test_a_name_of_more_digits_than_python_reads_is_of_no_sample() -> None:
    """`check` ended with a traceback."""
    scored = changed(first(f.SampleScored), sample=f"{'9' * 5000}.0")
    assert "was never submitted" in broken([RUN[0], scored], None)["I1"]


def test_a_state_and_a_history_of_other_sizes_of_a_group_differ() -> None:
    submitted = [one for one in RUN if isinstance(one.event, f.GroupSubmitted)][-1]
    more = [claiming(one, 2, 2**40) if one is submitted else one for one in RUN]
    assert "group 2 has 1 samples; the history shows 1099511627776" in broken(more, STATE)["I10"]
