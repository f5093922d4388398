"""What an agent, or a stranger with an agent's key, can make a manager do by saying much, or often."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
import pytest

from polyrl import wire
from polyrl.errors import ProtocolError
from polyrl.ledger import Effects, Ledger, LedgerConfig
from polyrl.ledger.audit.history import HistoryProjection
from polyrl.ledger.journal import encode_events
from polyrl.sample import Pool
from polyrl.wire import Fenced, HeldAssignment, Hello, Leaving, Resend, StartDrain, WeightsLoaded, Welcome
from polyrl_rollout.testing.stage import Stage, sent

HELLO: Final = Hello(1, "a", pool=Pool.SPOT, max_running=8, kv_tokens=100_000, max_context=4096, weight_version=0)

DEAF_S: Final = 0.1
"""The manager hears nobody else while it handles one frame."""


def journal_bytes(outcomes: list[Effects]) -> int:
    """What the journal keeps of it."""
    return sum(len(encode_events(event for event in outcome.events if event.durable)) for outcome in outcomes)


def holding(count: int) -> tuple[HeldAssignment, ...]:
    """Assignments that the ledger does not know."""
    return tuple(HeldAssignment(1000 + number, "9.0", attempt=1, length=5) for number in range(count))


def test_the_reason_of_a_notice_is_stored_once_and_cut() -> None:
    stage = Stage()
    stage.engine("a")
    first = wire.decode_from_agent(wire.encode(Leaving(60.0, "x" * 4_000_000)))
    outcomes = [stage.agent("a", first)]
    outcomes += [stage.agent("a", Leaving(60.0 - 0.9 * index, "sooner")) for index in range(60)]
    assert journal_bytes(outcomes) < 4 * wire.MAX_REASON
    assert stage.ledger.state.engines["a"].draining == "x" * wire.MAX_REASON
    assert len(sent(outcomes[-1], StartDrain)) == 1, "the earlier deadline still wins"


def test_deadlines_that_come_ever_closer_do_not_fill_the_journal() -> None:
    stage = Stage()
    stage.engine("a")
    outcomes = [stage.agent("a", Leaving(1e300 / (1 + index), "again")) for index in range(20_000)]
    outcomes += [stage.agent("a", Leaving(60.0 - 0.001 * index, "again")) for index in range(20_000)]
    assert journal_bytes(outcomes) < 100_000


def test_versions_below_nothing_are_no_news() -> None:
    """Each was another version to the ledger: 30 bytes of an agent were a row of the history, for good."""
    stage = Stage()
    stage.engine("a")
    project = HistoryProjection(stage.ledger.state).project
    outcomes = [
        stage.agent("a", message)
        for number in range(2, 50)
        for message in (
            WeightsLoaded(-number, 0.0, load_seconds=0.0, bytes_pulled=0),
            wire.WeightsFailed(0, -number, "no"),
            msgspec.structs.replace(HELLO, weight_version=-number, versions=(-number,)),
        )
    ]
    assert sum(1 for outcome in outcomes for event in outcome.events for _ in project(event)) < 10
    assert stage.ledger.state.engines["a"].version == -1


def test_who_greets_again_and_again_adds_nothing_to_the_history() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    project = HistoryProjection(stage.ledger.state).project
    hello = msgspec.structs.replace(HELLO, held=(HeldAssignment(1, "0.0", attempt=1, length=0),))
    outcomes = [stage.agent("a", hello) for _ in range(100)]
    assert all(sent(outcome, Welcome) and sent(outcome, Resend) for outcome in outcomes)
    assert not [entry for outcome in outcomes for event in outcome.events for entry in project(event)]
    assert journal_bytes(outcomes) < 100 * 50
    outcomes = [stage.agent("a", WeightsLoaded(0, 0.1, load_seconds=0.1, bytes_pulled=1)) for _ in range(100)]
    assert journal_bytes(outcomes) == journal_bytes([])
    bigger = stage.agent("a", msgspec.structs.replace(hello, max_running=9))
    assert [entry for event in bigger.events for entry in project(event)], "what is new is kept"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        pytest.param({"max_running": 65_537}, "max_running", id="larger than any engine"),
        pytest.param({"held": holding(81)}, "holds 81 assignments", id="more held than it can run"),
        pytest.param({"held": holding(4097), "max_running": 4096}, "are over", id="strange ones, each to be cancelled"),
    ],
)
def test_greetings_that_cost_too_much_are_fenced_and_change_nothing(changes: dict[str, Any], fault: str) -> None:
    stage = Stage()
    outcome = stage.agent("a", msgspec.structs.replace(HELLO, **changes))
    (fenced,) = outcome.to_agents
    assert fault in fenced[1].reason
    assert not stage.ledger.state.engines


def test_what_honest_agents_hold_is_heard() -> None:
    stage = Stage()
    assert sent(stage.agent("a", msgspec.structs.replace(HELLO, held=holding(80))), Welcome)
    assert not sent(stage.agent("a", msgspec.structs.replace(HELLO, held=holding(80))), Fenced)


def test_frames_over_an_agents_limit_and_names_without_end_are_refused() -> None:
    for message in (
        msgspec.structs.replace(HELLO, held=holding(400_000)),
        msgspec.structs.replace(HELLO, engine="e" * 129),
        msgspec.structs.replace(HELLO, held=(HeldAssignment(1, "9" * 129, attempt=1, length=0),)),
        msgspec.structs.replace(HELLO, versions=tuple(range(257))),
    ):
        with pytest.raises(ProtocolError):
            wire.decode_from_agent(wire.encode(message))


def test_every_text_of_an_agent_is_cut_where_it_is_read() -> None:
    for message in (
        Leaving(1.0, "x" * 5000),
        wire.Deregister("x" * 5000),
        wire.WeightsFailed(1, 0, reason="x" * 5000),
        wire.HandBack(1, "r" * 5000, detail="x" * 5000),
        msgspec.structs.replace(HELLO, leaving_reason="x" * 5000),
    ):
        longer = msgspec.to_builtins(message, builtin_types=(bytes,))
        raw = [
            item.ljust(5000, "x") if isinstance(item, str) and len(item) == wire.MAX_REASON else item for item in longer
        ]
        read = wire.decode_from_agent(bytes([wire.WIRE_VERSION]) + msgspec.msgpack.encode(raw))
        assert read == message
        assert len(wire.encode(read)) < 2200


def test_a_thousand_agents_that_dial_anew_at_once_are_each_answered_within_the_tenth_of_a_second() -> None:
    ledger, longest = Ledger(LedgerConfig(run_epoch=1)), 0.0
    hellos = [msgspec.structs.replace(HELLO, engine=f"engine-{number}") for number in range(1000)]
    for _ in range(2):
        for hello in hellos:
            begun = time.thread_time()
            outcome = ledger.from_agent(hello.engine, hello, 1.0)
            longest = max(longest, time.thread_time() - begun)
            assert sent(outcome, Welcome)
    assert longest < DEAF_S


def test_no_frame_of_an_agent_costs_more_than_a_tenth_of_a_second() -> None:
    """The largest that is read: as many assignments of no length as it holds."""
    frame = wire.encode(msgspec.structs.replace(HELLO, held=(HeldAssignment(1, "", attempt=1, length=0),) * 830_000))
    assert len(frame) <= wire.AGENT_FRAME_BYTES
    begun = time.thread_time()
    hello = wire.decode_from_agent(frame)
    assert sent(Stage().agent("a", hello), Fenced)  # type: ignore[arg-type]
    assert time.thread_time() - begun < 3 * DEAF_S, "three times, for a slow machine"


@pytest.mark.parametrize(
    ("claimed", "counts"), [(8, 8), (16, 16), (60_000, 16)], ids=["less", "as asked for", "far more"]
)
def test_an_engine_gets_no_more_than_the_manifest_says_whatever_it_claims(claimed: int, counts: int) -> None:
    stage = Stage(LedgerConfig(run_epoch=1, max_running=16))
    stage.agent("a", msgspec.structs.replace(HELLO, max_running=claimed))
    assert stage.ledger.state.engines["a"].capacity.max_running == counts
    many = msgspec.structs.replace(HELLO, max_running=claimed, held=holding(2 * counts + 65))
    assert sent(stage.agent("a", many), Fenced)
