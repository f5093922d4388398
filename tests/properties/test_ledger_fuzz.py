"""No sequence of decodable messages makes the ledger raise, lose count, or drift from its events.

What is drawn follows from the message classes: each of them, each of their fields, by the table of fields below.
Between them peers do what they should now and then (`PLAYS`), or nothing would ever be packed, kept or put to sleep.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, get_args

import msgspec
import pytest
from hypothesis import Phase, example, given, settings, strategies as st

from polyrl import wire
from polyrl.ledger import Effects, Event, Ledger, LedgerConfig
from polyrl.ledger.audit.audit import Audit
from polyrl.ledger.audit.history import HistoryEntry, HistoryProjection, ManagerStarted
from polyrl.ledger.causes import RestPhase
from polyrl.ledger.fleet import Fleet
from polyrl.ledger.state import LedgerState, SamplePhase, group_tokens
from polyrl.sample import DiscardReason, Group, Pool, Purpose, SamplingParams
from polyrl.weights.engine_sums import EngineSum
from polyrl.wire import Acknowledge, Asleep, BatchRequest, Deltas, FinishRun, Hello, Score, Submit, pack_ids, pack_rows
from polyrl_rollout.testing.stage import replay

CLASSES: Final = (*get_args(wire.FromAgent), *get_args(wire.FromTrainer))
ENGINES: Final = ("a", "b", "own")

ENDS: Final = (wire.FinishRun, wire.TrainerHello, wire.Deregister, wire.Leaving)
"""After them little happens."""


def mostly(common: st.SearchStrategy[Any], rare: st.SearchStrategy[Any], times: int = 9) -> st.SearchStrategy[Any]:
    """`one_of` draws a strategy once that is given twice."""
    return st.integers(0, times).flatmap(lambda draw: common if draw else rare)


small = st.integers(-1, 6)
numbers = mostly(st.integers(-1, 12), st.sampled_from([2**31, 2**63 - 1, -(2**63)]))
seconds = mostly(st.floats(-1.0, 40.0), st.sampled_from([float("nan"), float("inf"), 1e300]))
texts = st.text(max_size=3)
hashes = st.sampled_from([b"", b"h", b"i"])
names = st.sampled_from(["0.0", "0.1", "1.0", "2.1", "3.0", "9.9", "x", ".", "1.-1"])
samples = names | st.just("1." + "9" * 5000)
tokens = st.lists(st.sampled_from([2, 5, 6]), max_size=4)
engines = st.sampled_from(ENGINES)
ranges = st.lists(st.tuples(numbers, numbers), max_size=2).map(tuple)
sums = st.none() | st.builds(EngineSum, st.just("kind"), hashes, st.booleans())


@st.composite
def columns(draw: st.DrawFn) -> dict[str, bytes]:
    rows, ids = [], list[int]()
    for _ in range(draw(st.integers(0, 3))):
        row = draw(tokens)
        rows.append((draw(st.integers(0, 8)), draw(st.integers(0, 6)), len(row), draw(st.integers(0, 3))))
        ids += row
    packed = pack_ids(ids)
    return {"rows": pack_rows(rows), "ids": packed, "logprobs": packed if draw(st.integers(0, 9)) else packed[4:]}


groups = st.builds(
    Group,
    id=st.integers(-1, 40),
    step=st.integers(0, 1),
    purpose=st.sampled_from(Purpose),
    prompt_ids=st.sampled_from([0, 1, 1, 2, 3, 3]).map(lambda length: pack_ids([9] * length)),
    n=st.sampled_from([0, 1, 2, 2, 3, 3]),
    sampling=st.builds(SamplingParams, st.sampled_from([0, 1, 2, 4, 6, 12]), stop_token_ids=st.just((2,))),
    min_version=st.integers(0, 1),
    max_version=st.integers(0, 2),
    priority=small,
)
held = st.builds(wire.HeldAssignment, numbers, names, small, small)
measures = st.builds(wire.EngineMeasure, engines, small, st.integers(0, 10**6), seconds, seconds)

FIELDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    **dict.fromkeys(("run_epoch",), st.sampled_from([1, 1, 1, 1, 2])),
    **dict.fromkeys(("request", "asked", "batch", "order", "acknowledged", "next_group", "next_batch"), numbers),
    **dict.fromkeys(("version", "serving", "weight_version", "step", "turn", "assignment"), small),
    **dict.fromkeys(
        ("max_running", "queued", "running", "kv_free_tokens", "newest", "max_context", "seq"), small | numbers
    ),
    **dict.fromkeys(("min_samples", "max_samples", "vocabulary"), small),
    **dict.fromkeys(("max_tokens", "bytes_pulled", "bytes_from_peers", "peer_port"), numbers),
    **dict.fromkeys(("kv_tokens", "positions"), st.sampled_from([-1, 0, 1, 12, 30, 50])),
    **dict.fromkeys(("fresh", "covers", "alone", "ok", "sleeps", "asleep"), st.booleans()),
    **dict.fromkeys(("deadline_s", "seconds", "reward", "pull_seconds", "load_seconds"), seconds),
    **dict.fromkeys(("wait_seconds", "verify_seconds", "step_seconds", "read_seconds", "tried_seconds_ago"), seconds),
    **dict.fromkeys(("reason", "detail", "message", "phase", "trainer", "leaving_reason"), texts),
    **dict.fromkeys(("endpoint", "public_key"), texts),
    **dict.fromkeys(("manifest_hash", "content", "receipt", "peer_key"), hashes),
    **dict.fromkeys(("engine", "liars"), engines),
    "HandBack.reason": st.sampled_from([*wire.HandBackReason, "?"]),
    "HandBack.assignment": st.integers(0, 8),
    "Hello.max_running": st.sampled_from([-1, 1, 4, 4, 4, 6, 2**31]),
    "Hello.max_context": st.sampled_from([0, 5, 30, 30]),
    "PrefixUnknown.assignment": st.integers(0, 8),
    "Reject.reason": st.sampled_from(DiscardReason),
    "pool": st.sampled_from(Pool),
    "purpose": st.sampled_from(Purpose),
    "held": st.lists(held, max_size=2).map(tuple),
    "versions": st.lists(small, max_size=2).map(tuple),
    "receipts": st.dictionaries(small, hashes, max_size=2),
    "leaving_s": st.none() | seconds,
    "sum": sums,
    "liars": st.lists(engines, max_size=1).map(tuple),
    "sample": samples,
    "Fetch.samples": st.lists(samples, max_size=3).map(tuple),
    "TrainerReport.samples": st.lists(st.binary(max_size=3), max_size=1).map(tuple),
    "TrainerReport.engines": st.lists(measures, max_size=3).map(tuple),
    "Submit.groups": st.lists(groups, max_size=2).map(tuple),
    "NoticesTaken.groups": st.lists(numbers, max_size=3).map(tuple),
    "metrics": st.dictionaries(st.sampled_from(["x", "turn_reward/0"]), seconds, max_size=2),
    "values": st.dictionaries(texts, seconds, max_size=2),
    "ids": tokens.map(pack_ids) | st.binary(max_size=5),
    **dict.fromkeys(("batches", "acknowledged_above"), ranges),
    "others": st.lists(texts, max_size=1).map(tuple),
}


def drawn(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Messages of a class, by the table: a new class, or a field that it lacks, ends every test here."""
    fields = [field.name for field in msgspec.structs.fields(kind)]
    if kind is Deltas:
        return st.builds(
            lambda seq, version, packed: Deltas(seq, version, **packed), FIELDS["seq"], FIELDS["version"], columns()
        )
    return st.builds(kind, **{name: FIELDS.get(f"{kind.__name__}.{name}", FIELDS.get(name)) for name in fields})


MESSAGES: Final = {kind: drawn(kind) for kind in CLASSES}


def played(ledger: Ledger, what: str, request: int) -> list[tuple[str, Any]]:
    """Messages of peers that do what they should: by engine, empty for the trainer."""
    state = ledger.state
    match what:
        case "generate" | "finish":
            rows = {name: [] for name in state.engines}
            for number, assignment in state.assignments.items():
                code = 1 if what == "finish" else 2 * (assignment.limit - assignment.length == 1)
                rows[assignment.engine].append((number, assignment.length, 1, code))
            token = 2 if what == "finish" else 5
            packed = {name: pack_ids([token] * len(of)) for name, of in rows.items()}
            return [
                (name, Deltas(engine.seq + 1, engine.version, pack_rows(rows[name]), packed[name], packed[name]))
                for name, engine in state.engines.items()
            ]
        case "score":
            asked = [(name, state.samples[name]) for name in state.awaiting_verdict]
            return [("", Score(request, name, turn=sample.turn, reward=sample.index)) for name, sample in asked]
        case "take":
            asked = [(step.step, step.purpose) for step in state.steps.values() if step.ready]
            return [
                ("", BatchRequest(request + place, step, purpose, 1, 4, 10**6, 30.0, alone=request % 20 > 0))
                for place, (step, purpose) in enumerate(asked)
            ]
        case "withdraw":
            return [("", wire.Withdraw(request, one.request.request)) for one in tuple(state.batches.values())[-1:]]
        case "cover":
            return [("", wire.Covered(request, ((0, batch + 1),))) for batch in tuple(state.kept)[:1]]
        case "notice":
            return [("", wire.NoticesTaken(tuple(one.group for step in state.steps.values() for one in step.notices)))]
        case "acknowledge":
            return [("", Acknowledge(request, batch)) for batch in state.batches]
        case "sleep":
            falling = [one for one in state.engines.values() if one.rest.phase is RestPhase.FALLING]
            return [(one.name, Asleep(0.1, one.rest.order)) for one in falling]
        case "greet":
            drain = [(one.name, wire.Deregister("it has drained")) for one in state.engines.values() if one.draining]
            return drain + [(name, _greeting(state, name)) for name in ENGINES]
        case "return":
            recalled = [(number, one.engine) for number, one in state.assignments.items() if one.recall_cause]
            return [(engine, wire.HandBack(number, wire.HandBackReason.RECALLED)) for number, engine in recalled]
    pytest.fail(f"nobody plays {what}")


PLAYS: Final = (
    *("generate", "finish", "score", "take", "acknowledge", "withdraw", "cover", "notice", "sleep", "greet", "return"),
    *("finish score", "finish score take", "finish score take return sleep", "return sleep greet"),
)
"""One after the other."""


def _greeting(state: LedgerState, name: str) -> Hello:
    """With all that left it while it was silent, and two tokens more of each."""
    runs = [(n, one.sample, one.length) for n, one in state.assignments.items() if one.engine == name]
    runs += [(one.left[name][0], key, one.left[name][1]) for key, one in state.samples.items() if name in one.left]
    of_pool = {"pool": Pool.RESERVED, "sleeps": True} if name == "own" else {"pool": Pool.SPOT}
    return Hello(
        1,
        name,
        max_running=4,
        kv_tokens=50,
        max_context=30,
        weight_version=state.weights.version,
        held=tuple(wire.HeldAssignment(number, sample, 1, length + 2) for number, sample, length in runs),
        **of_pool,
    )


def of_classes(kinds: Iterable[type]) -> st.SearchStrategy[Any]:
    agents = get_args(wire.FromAgent)
    return st.one_of(
        st.tuples(st.just("agent" if kind in agents else "trainer"), engines, MESSAGES[kind]) for kind in kinds
    )


helpful = st.one_of(
    mostly(st.tuples(st.just("play"), engines, st.sampled_from(PLAYS)), of_classes([Submit]), times=4),
    st.tuples(st.just("wait"), engines, mostly(st.floats(0.0, 1.5), st.floats(1.5, 20.0))),
)
drawn_message = mostly(of_classes(kind for kind in CLASSES if kind not in ENDS), of_classes(ENDS), times=19)
from_outside = st.one_of(
    st.tuples(st.just("drain"), engines, seconds),
    st.tuples(st.just("restart"), engines, st.none()),
    st.tuples(st.just("stopped"), engines, st.floats(0.0, 20.0)),
)
events = mostly(mostly(helpful, drawn_message, times=1), from_outside, times=19)


class Run:
    """A ledger, and all that it has decided."""

    def __init__(self) -> None:
        self.ledger, self.now = Ledger(LedgerConfig(run_epoch=1, group_filter="nonzeroSpread")), 0.0
        self.events: list[Event] = []
        self._audit, self._history, self._request = Audit(), HistoryProjection(self.ledger.state), 100
        self._started()

    def take(self, kind: str, engine: str, what: Any) -> None:
        """One input, or those of one play; then everything is looked through."""
        if kind == "play":
            for part in what.split():
                self._request += 10
                for peer, message in played(self.ledger, part, self._request):
                    self.take("agent" if peer else "trainer", peer, message)
            return
        if kind == "wait":
            until, ticks = self.now + what, 0
            while (due := self.ledger.next_due()) is not None and due < until:
                self.now = max(self.now, due)
                self._note(self.ledger.tick(self.now))
                ticks += 1
                assert ticks < 1000, "it is due again and again"
            self.now = until
            self._note(self.ledger.tick(self.now))
            return
        self._note(self._decided(kind, engine, what))

    def _decided(self, kind: str, engine: str, what: Any) -> Effects:
        if kind == "agent":
            if isinstance(what, Hello) and what.weight_version >= 0:
                what = msgspec.structs.replace(what, engine=engine)
            return self.ledger.from_agent(engine, what, self.now)
        if kind == "trainer":
            return self.ledger.from_trainer(what, self.now)
        if kind == "drain":
            return self.ledger.drain(engine, what, "drained by a test", self.now)
        if kind == "restart":
            self.ledger = Ledger(self.ledger.state.config, replay(self.ledger.state.config, self.events))
            self._started()
            return self.ledger.resume(self.now)
        assert kind == "stopped", kind
        self.now += what
        return self.ledger.tick(self.now)

    def _note(self, outcome: Effects) -> None:
        self.events += outcome.events
        for event in outcome.events:
            for entry in self._history.project(event):
                self._audit.take(entry)
        assert self._audit.findings.first_broken() is None, self._audit.findings.first_broken()
        check(self.ledger, self.now)

    def _started(self) -> None:
        config = self.ledger.state.config
        self._audit.take(HistoryEntry(self.now, ManagerStarted(self.now, config)))


def check(ledger: Ledger, now: float) -> None:
    """What any state must satisfy, counted from what there is one by one."""
    state, status = ledger.state, ledger.status(now)
    ended = status.samples.acknowledged + sum(status.samples.discarded.values())
    assert status.samples.submitted == ended + status.samples.open
    for wait in ledger.waits(now):
        assert wait.sentence(now)
    entries = state.groups.values()
    for step in state.steps.values():
        assert step.submitted == step.open + len(step.ready) + step.packed + step.acknowledged + step.dropped
        assert step.ready_samples == sum(state.groups[number].group.n for number in step.ready)
    assert state.queue == sorted(entry.key for entry in entries if entry.waiting)
    phases = {phase: {key for key, one in state.samples.items() if one.phase is phase} for phase in SamplePhase}
    assert set(state.awaiting_verdict) == phases[SamplePhase.TURN_DONE]
    assert {one.sample for one in state.assignments.values()} == phases[SamplePhase.ASSIGNED]
    kept = [number for batch in state.kept.values() for number in batch]
    assert len(phases[SamplePhase.KEPT]) == sum(state.groups[number].group.n for number in kept)
    assert state.kept_tokens == sum(group_tokens(state, number) for number in kept)
    trained = [entry for entry in entries if entry.ready and entry.group.purpose is Purpose.TRAIN]
    assert state.backlog == sum(group_tokens(state, one.group.id) for one in trained if one.group.id not in kept)
    for engine in state.engines.values():
        assert not (engine.running and engine.rest.phase is RestPhase.ASLEEP)
        running = [state.assignments[number] for number in engine.running]
        assert engine.kv == sum(one.kv for one in running)
        assert engine.kv_growth == sum(one.kv_end - one.length for one in running)
        assert engine.starting == sum(not one.begun for one in running)
        assert engine.recalled == sum(bool(one.recall_cause) for one in running)
        assert sum(engine.work.samples.values()) == len(running)
        for number in engine.reserved_kv:
            assert state.assignments[number].recall_target == engine.name
    afresh = Fleet(state)
    for order in ("roomy", "busy", "idle", "leaving", "reserved"):
        in_order = [sorted(one.name for one in getattr(fleet, order)()) for fleet in (ledger.fleet, afresh)]
        assert in_order[0] == in_order[1], order
    silent = [sorted(one.name for one in fleet.some_silent()[0]) for fleet in (ledger.fleet, afresh)]
    assert silent[0] == silent[1]


OPENING: Final = (
    ("trainer", "", wire.TrainerHello(1, -1, covers=True)),
    ("trainer", "", wire.PublishVersion(0, 0, endpoint="tcp://x", public_key="k", manifest_hash=b"h")),
    ("agent", "a", Hello(1, "a", pool=Pool.SPOT, max_running=4, kv_tokens=50, max_context=30, weight_version=0)),
    (
        "trainer",
        "",
        Submit(1, (Group(0, 0, Purpose.TRAIN, pack_ids([9]), 2, SamplingParams(4), min_version=0, max_version=1),)),
    ),
)
ENDING: Final = ("trainer", "", FinishRun(99, True, message=""))


MORE_THAN_THE_MOST: Final = [
    ("play", "a", "finish score"),
    (
        "trainer",
        "",
        Submit(2, (Group(1, 0, Purpose.TRAIN, pack_ids([9]), 1, SamplingParams(4), min_version=0, max_version=1),)),
    ),
    (
        "trainer",
        "",
        BatchRequest(3, 0, Purpose.TRAIN, min_samples=3, max_samples=2, max_tokens=1 << 20, deadline_s=1.0),
    ),
]
"""A request for at least 3 and at most 2."""


@settings(max_examples=150, deadline=None)
@given(st.lists(events, min_size=40, max_size=80), st.booleans())
@example(MORE_THAN_THE_MOST, False)
def test_no_message_breaks_the_ledger(script: list[tuple[str, str, Any]], finish: bool) -> None:
    run = Run()
    for one in (*OPENING, *script, *((ENDING,) if finish else ())):
        run.take(*one)
    rebuilt = replay(run.ledger.state.config, run.events)
    assert msgspec.msgpack.encode(rebuilt) == msgspec.msgpack.encode(run.ledger.state)
    assert not finish or not run.ledger.state.groups


def test_every_class_of_message_is_drawn() -> None:
    """By what a trainer and an agent may send: a class that is added there is drawn from then on, or this fails."""
    seen = set[type]()

    @settings(max_examples=60, deadline=None, database=None, phases=[Phase.generate])
    @given(st.lists(events, min_size=40, max_size=80))
    def draw(script: list[tuple[str, str, Any]]) -> None:
        seen.update(type(what) for _, _, what in script)

    draw()
    assert set(CLASSES) - seen == set()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_is_drawn(kind: type) -> None:
    seen: dict[str, set[str]] = {}

    @settings(max_examples=5, deadline=None, database=None, phases=[Phase.generate])
    @given(st.lists(MESSAGES[kind], min_size=40))
    def draw(messages: list[Any]) -> None:
        for message in messages:
            for field in msgspec.structs.fields(kind):
                seen.setdefault(field.name, set()).add(repr(getattr(message, field.name)))

    draw()
    assert {field.name for field in msgspec.structs.fields(kind) if len(seen[field.name]) < 2} == set()
