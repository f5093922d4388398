"""No sequence of decodable messages makes the ledger raise, lose count, or drift from its events."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings, strategies as st

from polyrl.ledger import Ledger, LedgerConfig
from polyrl.sample import DiscardReason, Group, Pool, Purpose, SamplingParams
from polyrl.wire import (
    Acknowledge,
    BatchRequest,
    Deltas,
    Deregister,
    EndStep,
    Extend,
    FinishRun,
    HandBack,
    Heartbeat,
    HeldAssignment,
    Hello,
    Leaving,
    PublishVersion,
    Reject,
    Score,
    Submit,
    TrainerHeartbeat,
    TrainerHello,
    TrainerReport,
    WeightsFailed,
    WeightsLoaded,
    pack_ids,
    pack_rows,
)
from polyrl_rollout.testing.stage import replay

small = st.integers(-1, 6)
numbers = st.integers(-1, 12) | st.sampled_from([2**31, 2**63 - 1, -(2**63)])
seconds = st.floats(-1.0, 40.0) | st.sampled_from([float("nan"), float("inf"), 1e300])
samples = st.sampled_from(["0.0", "0.1", "1.0", "2.1", "9.9", "x", ".", "1.-1", "1." + "9" * 5000])
tokens = st.lists(st.sampled_from([2, 5, 6]), max_size=4)
engines = st.sampled_from(["a", "b"])


@st.composite
def deltas(draw: st.DrawFn) -> Deltas:
    rows, ids = [], []
    for _ in range(draw(st.integers(0, 3))):
        row = draw(tokens)
        rows.append((draw(st.integers(0, 8)), draw(st.integers(0, 6)), len(row), draw(st.integers(0, 3))))
        ids += row
    columns = pack_ids(ids)
    logprobs = columns if draw(st.integers(0, 9)) else columns[4:]
    return Deltas(draw(small), draw(st.integers(0, 2)), rows=pack_rows(rows), ids=columns, logprobs=logprobs)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    sampling = SamplingParams(draw(st.integers(0, 6)), stop_token_ids=(2,))
    return Group(
        draw(st.integers(-1, 5)),
        draw(st.integers(0, 1)),
        purpose=draw(st.sampled_from(Purpose)),
        prompt_ids=pack_ids(draw(st.lists(st.just(9), max_size=3))),
        n=draw(st.integers(0, 3)),
        sampling=sampling,
        min_version=draw(st.integers(0, 1)),
        max_version=draw(st.integers(0, 2)),
        priority=draw(small),
    )


held = st.builds(HeldAssignment, numbers, samples, small, small)
agent_messages = st.one_of(
    st.builds(Hello, st.just(1), engines, st.sampled_from(Pool), small, st.just(50), small, small, st.just(())),
    st.builds(
        Hello, st.just(1), engines, st.just(Pool.SPOT), st.just(4), st.just(50), st.just(30), small, st.tuples(held)
    ),
    deltas(),
    deltas(),
    st.builds(Heartbeat, small, small, small),
    st.builds(WeightsLoaded, st.integers(0, 2), seconds, seconds, numbers),
    st.builds(WeightsFailed, numbers, small, st.text(max_size=3)),
    st.builds(HandBack, st.integers(0, 8), st.sampled_from(["rejected", "engineError", "draining", "?"])),
    st.builds(Leaving, seconds, st.text(max_size=3)),
    st.builds(Deregister, st.text(max_size=3)),
)
trainer_messages = st.one_of(
    st.builds(TrainerHello, st.just(1), numbers),
    st.builds(Submit, numbers, st.lists(groups(), max_size=2).map(tuple)),
    st.builds(Score, numbers, samples, small, seconds),
    st.builds(Extend, numbers, samples, small, tokens.map(pack_ids) | st.binary(max_size=5)),
    st.builds(Reject, numbers, samples, st.sampled_from(DiscardReason), st.text(max_size=3)),
    st.builds(BatchRequest, numbers, small, st.sampled_from(Purpose), small, small, numbers, seconds),
    st.builds(Acknowledge, numbers, numbers),
    st.builds(EndStep, numbers, small, st.sampled_from(Purpose)),
    st.builds(PublishVersion, numbers, numbers, st.just("tcp://x"), st.just("k"), st.just(b"h")),
    st.builds(TrainerReport, numbers, st.text(max_size=3), small, st.just({})),
    st.builds(TrainerHeartbeat),
)
events = st.one_of(
    st.tuples(st.just("agent"), engines, agent_messages),
    st.tuples(st.just("trainer"), st.none(), trainer_messages),
    st.tuples(st.just("tick"), st.none(), st.floats(0.0, 10.0)),
    st.tuples(st.just("drain"), engines, seconds),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=60), st.booleans())
def test_no_message_breaks_the_ledger(script: list[tuple[str, str, object]], finish: bool) -> None:
    ledger, now, events = Ledger(LedgerConfig(run_epoch=1, group_filter="nonzeroSpread")), 0.0, []
    opening = [
        ("trainer", "", TrainerHello(1, -1)),
        ("trainer", "", PublishVersion(0, 0, endpoint="tcp://x", public_key="k", manifest_hash=b"h")),
        ("agent", "a", Hello(1, "a", pool=Pool.SPOT, max_running=4, kv_tokens=50, max_context=30, weight_version=0)),
        (
            "trainer",
            "",
            Submit(
                1,
                (
                    Group(
                        0,
                        0,
                        purpose=Purpose.TRAIN,
                        prompt_ids=pack_ids([9]),
                        n=2,
                        sampling=SamplingParams(4),
                        min_version=0,
                        max_version=1,
                    ),
                ),
            ),
        ),
    ]
    ending = [("trainer", "", FinishRun(99, True, message=""))] if finish else []
    for kind, engine, what in [*opening, *script, *ending]:
        if kind == "agent":
            outcome = ledger.from_agent(engine, what, now)  # type: ignore[arg-type]
        elif kind == "trainer":
            outcome = ledger.from_trainer(what, now)  # type: ignore[arg-type]
        elif kind == "drain":
            outcome = ledger.drain(engine, what, "drained by a test", now)  # type: ignore[arg-type]
        else:
            now += what  # type: ignore[operator]
            outcome = ledger.tick(now)
        events += outcome.events
        status = ledger.status(now)
        ended = status.samples.acknowledged + sum(status.samples.discarded.values())
        assert status.samples.submitted == ended + status.samples.open
        for step in ledger.state.steps.values():
            assert step.submitted == step.open + len(step.ready) + step.packed + step.acknowledged + step.dropped
        for wait in ledger.waits(now):
            assert wait.sentence(now)
    rebuilt = replay(ledger.state.config, events)
    assert msgspec.msgpack.encode(rebuilt) == msgspec.msgpack.encode(ledger.state)
    assert not finish or not ledger.state.groups
