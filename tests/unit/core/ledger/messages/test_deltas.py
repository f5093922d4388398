"""Tokens in: overlaps, gaps, foreign and impossible rows, ends, migration."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from polyrl.ledger import Effects, LedgerConfig
from polyrl.ledger.state import SamplePhase
from polyrl.sample import Finish, Pool
from polyrl.wire import (
    MAX_ROWS,
    Assign,
    Cancel,
    Deltas,
    Deregister,
    Fenced,
    HandBack,
    HeldAssignment,
    Hello,
    PrefixUnknown,
    Resend,
    TokensKept,
    TurnDone,
    checksum_of,
    pack_ids,
    pack_rows,
    unpack_ids,
)
from polyrl_rollout.agent.protocol import AgentProtocol
from polyrl_rollout.engines.port import TokenChunk
from polyrl_rollout.testing.simulation.model import logprobs_of
from polyrl_rollout.testing.stage import Stage, replay, sent, snapshot


def ready(**fields: object) -> Stage:
    stage = Stage()
    stage.engine("a")
    stage.submit(**fields)  # type: ignore[arg-type]
    return stage


def ids(stage: Stage, sample: str = "0.0") -> list[int]:
    return list(unpack_ids(bytes(stage.ledger.state.samples[sample].ids)))


def test_tokens_are_kept_and_answered() -> None:
    stage = ready()
    assert sent(stage.tokens("a", 1, [5, 6]), TokensKept)
    stage.tokens("a", 1, [7])
    assert ids(stage) == [5, 6, 7]


def test_an_overlap_is_cut_and_a_repeat_changes_nothing() -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 6])
    stage.tokens("a", 1, [5, 6, 7], offset=0)
    stage.tokens("a", 1, [6, 7], offset=1)
    assert ids(stage) == [5, 6, 7]
    assert stage.ledger.state.counters.tokens_repeated == 4


def test_a_gap_is_asked_for_once_and_nothing_is_called_safe_until_it_is_filled() -> None:
    stage = ready()
    outcome = stage.tokens("a", 1, [7], offset=2)
    assert sent(outcome, Resend) == [Resend(1, 0)]
    assert not sent(outcome, TokensKept)
    assert not sent(stage.tokens("a", 1, [8], offset=3), Resend)
    assert sent(stage.tokens("a", 1, [5, 6, 7], offset=0), TokensKept)
    assert ids(stage) == [5, 6, 7]


def rows_of_one_frame(stage: Stage, *rows: tuple[int, list[int]]) -> Effects:
    """Rows of assignment 1 of engine `a`: offset and tokens of each."""
    tokens = [token for _, row in rows for token in row]
    packed = pack_rows([(1, offset, len(row), 0) for offset, row in rows])
    stage.now += 0.001
    message = Deltas(
        stage.ledger.state.engines["a"].seq + 1,
        0,
        rows=packed,
        ids=pack_ids(tokens),
        logprobs=logprobs_of(np.array(tokens)),
    )
    return stage.agent("a", message)


def test_rows_of_one_frame_may_overlap_what_is_here_and_each_other() -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 6])
    rows_of_one_frame(stage, (1, [6, 7, 8]), (0, [5, 6, 7]), (3, [8, 9]), (2, [7, 8, 9, 4]))
    assert ids(stage) == [5, 6, 7, 8, 9, 4]


@pytest.mark.parametrize("third", [(0, [5, 9, 7]), (1, [6, 9, 8]), (2, [7, 9])], ids=["stored", "both", "ahead"])
def test_a_row_that_says_other_tokens_than_its_frame_did_ends_the_assignment(third: tuple[int, list[int]]) -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 6])
    assert sent(rows_of_one_frame(stage, (0, [5, 6]), (2, [7, 8]), third), Cancel) == [Cancel(1)]
    assert ids(stage) == [5, 6, 7, 8]


LONG, ROW, FRAME_CPU_S = 200_000, 50_000, 2.0
"""A frame of as many repeats as it may hold took 13 GB of copies; it takes a tenth of a second."""


def test_repeats_cost_what_they_say_and_not_the_length_of_their_sample() -> None:
    stage = Stage()
    stage.engine("a", kv_tokens=1 << 20, max_context=1 << 20)
    stage.submit(max_new_tokens=2 * LONG)
    for offset in range(0, LONG, ROW):
        stage.tokens("a", 1, [5] * ROW, offset=offset)
    began = time.process_time()
    rows_of_one_frame(stage, *[(0, [5, 5, 5])] * MAX_ROWS)
    assert time.process_time() - began < FRAME_CPU_S
    assert stage.ledger.state.counters.tokens_repeated == 3 * MAX_ROWS


def test_other_tokens_than_before_end_the_assignment() -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 6])
    outcome = stage.tokens("a", 1, [5, 9, 7], offset=0)
    assert sent(outcome, Cancel) == [Cancel(1)]
    assert ids(stage) == [5, 6]


@pytest.mark.parametrize("version", [1, -1, 7])
def test_a_version_that_may_not_generate_is_refused(version: int) -> None:
    stage = ready()
    assert sent(stage.tokens("a", 1, [5], version=version), Cancel)
    assert ids(stage) == []
    assert stage.ledger.status(0.0).tokens.regenerated == 1


def test_rows_of_others_assignments_are_dropped() -> None:
    stage = ready()
    stage.engine("b")
    stage.tokens("b", 1, [5])
    stage.tokens("b", 99, [5])
    assert ids(stage) == []


def test_nothing_is_taken_after_the_end() -> None:
    stage = ready()
    (turn,) = sent(stage.tokens("a", 1, [5, 2], "stop"), TurnDone)
    assert turn.response.finish is Finish.STOP
    stage.tokens("a", 1, [7], offset=2)
    assert ids(stage) == [5, 2]


def test_more_than_the_budget_is_cut_off() -> None:
    stage = ready(max_new_tokens=3)
    outcome = stage.tokens("a", 1, [5, 6, 7, 8])
    (turn,) = sent(outcome, TurnDone)
    assert turn.response.finish is Finish.LENGTH
    assert ids(stage) == [5, 6, 7]
    assert sent(outcome, Cancel)


def test_a_length_end_before_the_budget_is_no_end() -> None:
    stage = ready()
    stage.tokens("a", 1, [5], "length")
    assert stage.ledger.state.samples["0.0"].phase is SamplePhase.WAITING


def test_several_rows_of_one_assignment_in_one_frame() -> None:
    stage = ready()

    stage.tokens("a", 1, [5])
    frame = Deltas(
        9,
        0,
        rows=pack_rows([(1, 1, 2, 0), (1, 3, 1, 1)]),
        ids=bytes([6, 0, 0, 0, 7, 0, 0, 0, 2, 0, 0, 0]),
        logprobs=bytes(12),
    )
    assert sent(stage.agent("a", frame), TurnDone)
    assert ids(stage) == [5, 6, 7, 2]


def test_a_lost_engine_costs_no_token() -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 6])
    stage.now = 2.5
    stage.engine("b")
    outcome = stage.pass_time(0.6)
    (assign,) = sent(outcome, Assign)
    assert (assign.offset, assign.max_new_tokens, assign.attempt) == (2, 98, 2)
    assert unpack_ids(assign.input_ids).tolist()[-2:] == [5, 6]
    stage.tokens("b", assign.assignment, [7, 2], "stop")
    response = stage.ledger.state.samples["0.0"]
    assert [(s.start, s.end, s.engine, s.attempt) for s in response.spans] == [(0, 2, "a", 1), (2, 4, "b", 2)]
    assert sent(stage.tokens("a", 1, [7]), Fenced)


@pytest.mark.parametrize(
    ("last", "finish"),
    [pytest.param([5, 2], Finish.STOP, id="a stop token"), pytest.param([5, 6, 7], Finish.LENGTH, id="the budget")],
)
def test_what_is_over_is_not_generated_on(last: list[int], finish: Finish) -> None:
    stage = ready(max_new_tokens=3)
    turn = sent(stage.tokens("a", 1, last), TurnDone) or sent(stage.agent("a", Deregister("gone")), TurnDone)
    assert turn[0].response.finish is finish


def test_an_environments_stop_token_does_not_end_the_next_turn() -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 2], "stop")
    (assign,) = sent(stage.extend("0.0", [8, 2]), Assign)
    assert (assign.offset, assign.max_new_tokens) == (4, 98)
    stage.agent("a", Deregister("gone"))
    assert stage.ledger.state.samples["0.0"].phase is SamplePhase.WAITING
    assert stage.ledger.state.samples["0.0"].turn == 1


def test_greeting_again_goes_on_where_we_are() -> None:
    stage = ready(n=3)
    for number in (1, 2, 3):
        stage.tokens("a", number, [5, 6])
    held = (
        HeldAssignment(1, "0.0", attempt=1, length=4),
        HeldAssignment(2, "0.1", attempt=1, length=1),
        HeldAssignment(77, "9.9", attempt=1, length=4),
    )
    outcome = stage.agent(
        "a",
        Hello(
            1,
            "a",
            pool=stage.ledger.state.engines["a"].pool,
            max_running=8,
            kv_tokens=1000,
            max_context=1000,
            weight_version=0,
            held=held,
        ),
    )
    assert sent(outcome, Resend) == [Resend(1, 2)]
    assert {cancel.assignment for cancel in sent(outcome, Cancel)} == {2, 3, 77}
    assert {assign.sample for assign in sent(outcome, Assign)} == {"0.1", "0.2"}


def test_facts_rebuild_the_state_also_after_a_journey_through_bytes() -> None:
    stage = ready(n=2)
    stage.tokens("a", 1, [5, 2], "stop")
    stage.score("0.0")
    stage.tokens("a", 2, [7], offset=4)
    stage.pass_time(3.5)
    assert msgspec.msgpack.encode(replay(LedgerConfig(run_epoch=1), stage.events)) == snapshot(stage.ledger)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(Deltas(1, 0, rows=b"short", ids=b"", logprobs=b""), id="no whole row"),
        pytest.param(Deltas(1, 0, rows=bytes(11), ids=b"1234", logprobs=b"1234"), id="tokens without a row"),
        pytest.param(Deltas(1, 0, rows=bytes(10) + b"\x09", ids=b"", logprobs=b""), id="no such finish code"),
    ],
)
def test_malformed_columns_are_counted(frame: Deltas) -> None:
    stage = ready()
    stage.agent("a", frame)
    assert stage.ledger.state.counters.ignored["malformedDeltas"] == 1


def test_the_next_turn_at_the_same_engine_brings_only_what_is_new() -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 2], "stop")
    (assign,) = sent(stage.extend("0.0", [8, 9]), Assign)
    whole = pack_ids([9] * 10 + [5, 2, 8, 9])
    assert (assign.base, assign.input_ids, assign.offset) == (12, whole[48:], 4)
    assert assign.base_check == checksum_of(whole[:48])
    (again,) = sent(stage.agent("a", PrefixUnknown(assign.assignment)), Assign)
    assert (again.base, again.input_ids, again.assignment) == (0, whole, assign.assignment)
    assert not sent(stage.agent("a", PrefixUnknown(assign.assignment)), Assign), "12 bytes for the whole text, for ever"
    stage.now += stage.ledger.state.config.gone_s
    assert sent(stage.agent("a", PrefixUnknown(assign.assignment)), Assign), "the answer may have been lost"
    stage.tokens("a", assign.assignment, [6, 2], "stop")
    (third,) = sent(stage.extend("0.0", [8], turn=1), Assign)
    assert (third.base, third.input_ids) == (16, pack_ids([8])), "what is left out grows with the turns"


def test_another_engine_gets_the_whole_text_and_so_does_the_next_attempt_at_the_same() -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 2], "stop")
    stage.engine("b")
    (first,) = sent(stage.extend("0.0", [8]), Assign)
    assert first.base == 12
    (second,) = sent(stage.agent("a", Deregister("gone")), Assign)
    assert (second.base, second.input_ids) == (0, pack_ids([9] * 10 + [5, 2, 8]))


def test_who_did_not_end_the_last_turn_gets_the_whole_text() -> None:
    stage = ready()
    stage.tokens("a", 1, [5, 2], "stop")
    stage.engine("b")
    stage.drain("a", 60.0)
    (assign,) = sent(stage.extend("0.0", [8]), Assign)
    assert (assign.base, len(assign.input_ids)) == (0, 4 * 13)


def test_a_second_attempt_at_the_same_engine_gets_the_whole_text() -> None:
    """What it generated in the first may be part of the sample now, and is no part of the text it keeps."""
    stage = ready()
    stage.tokens("a", 1, [5, 2], "stop")
    (assign,) = sent(stage.extend("0.0", [8]), Assign)
    stage.tokens("a", assign.assignment, [6])
    stage.agent("a", HandBack(assign.assignment, "engineError"))
    (again,) = sent(stage.pass_time(2.0), Assign)
    assert (again.base, len(again.input_ids)) == (0, 4 * 14)


def test_a_text_is_sent_only_to_whom_the_assignment_is() -> None:
    stage = ready()
    stage.engine("b")
    assert not sent(stage.agent("b", PrefixUnknown(1)), Assign)
    assert not sent(stage.agent("a", PrefixUnknown(99)), Assign)


@pytest.mark.parametrize("greets_again", [False, True], ids=["first greeting", "another greeting"])
@pytest.mark.parametrize("frames_before", [0, 1], ids=["the first frame of all", "a later one"])
def test_after_a_lost_frame_the_agent_keeps_what_we_still_wait_for(frames_before: int, *, greets_again: bool) -> None:
    """The lost one held the whole first sample; the receipt of the next one must not let the agent forget it."""
    stage, agent = Stage(), AgentProtocol()

    def greet() -> None:
        known = {"held": agent.book.held(), "seq": agent.book.seq}
        hello = Hello(1, "a", Pool.SPOT, 8, 1000, max_context=4096, weight_version=0, **known)
        for _, answer in stage.agent("a", hello).to_agents:
            agent.receive(answer, stage.now)

    def generate(number: int, *ids: int, finish: Finish | None = None) -> list[Deltas]:
        agent.book.add(number, TokenChunk(list(ids), [-0.5] * len(ids), version=0, finish=finish), stage.now)
        return agent.book.pack(stage.now, 0.03, flush=True)

    greet()
    for _, message in stage.submit(2).to_agents:
        assert isinstance(message, Assign)
        agent.accept(message, 0)
    for _ in range(frames_before):
        for frame in generate(2, 5):
            stage.agent("a", frame)
    if greets_again:
        greet()
    generate(1, 5, 2, finish=Finish.STOP)  # lost on the way
    for frame in generate(2, 5):
        for _, answer in stage.agent("a", frame).to_agents:
            agent.receive(answer, stage.now)
    assert 1 in agent.book.streams
    frames = agent.book.pack(stage.now, 0.03, flush=True)
    assert [turn.group for frame in frames for turn in sent(stage.agent("a", frame), TurnDone)] == [0]
    assert stage.ledger.state.samples["1.0"].length == frames_before + 1, "nothing is taken twice"


def test_numbers_of_an_earlier_connection_are_no_loss() -> None:
    stage = ready()
    stage.tokens("a", 1, [5])
    engine = stage.ledger.state.engines["a"]
    held = (HeldAssignment(1, "0.0", attempt=1, length=1),)
    stage.agent("a", Hello(1, "a", engine.pool, 8, 1000, max_context=1000, weight_version=0, held=held))
    stage._seq["a"] += 5
    assert not sent(stage.tokens("a", 1, [5]), Resend)
