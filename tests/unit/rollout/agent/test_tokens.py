"""The agent's token book: whatever is lost, repeated or asked again, the manager ends up with exactly the tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.scheduling.notice import reserve_of
from polyrl.sample import Finish, SamplingParams
from polyrl.wire import FINISH_CODES, MAX_ROWS, ROW_DTYPE, Assign, Deltas, check_deltas, encode, pack_ids, unpack_ids
from polyrl_rollout.agent.protocol import GATHER_PERIODS, GOAL_BYTES, MAX_ROW_TOKENS, TokenBook
from polyrl_rollout.engines.port import TokenChunk

DELTA_S = LedgerConfig(run_epoch=1).delta_s
SAMPLING = SamplingParams(max_new_tokens=1 << 20)


def assign(number: int, offset: int = 0, budget: int = 1 << 20) -> Assign:
    return Assign(
        number,
        f"{number}.0",
        attempt=0,
        input_ids=pack_ids([1, 2, 3]),
        offset=offset,
        max_new_tokens=budget,
        sampling=SAMPLING,
        min_version=0,
        max_version=9,
    )


def chunk(ids: list[int], version: int = 0, finish: Finish | None = None) -> TokenChunk:
    return TokenChunk(ids, [-0.25 * token for token in ids], version=version, finish=finish)


class Receiver:
    """Takes deltas as the ledger does: trims what overlaps, asks for what is missing."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.versions: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}

    def take(self, deltas: Deltas) -> dict[int, int]:
        """Returns gaps: assignment to the position that is missing."""
        check_deltas(deltas)
        ids, logprobs = unpack_ids(deltas.ids).tolist(), np.frombuffer(deltas.logprobs, "<f4").tolist()
        gaps: dict[int, int] = {}
        for row in np.frombuffer(deltas.rows, dtype=ROW_DTYPE):
            number, offset, count = int(row["assignment"]), int(row["offset"]), int(row["count"])
            row_ids, ids = ids[:count], ids[count:]
            row_logprobs, logprobs = logprobs[:count], logprobs[count:]
            have = self.ids.setdefault(number, [])
            if offset > len(have):
                gaps[number] = len(have)
                continue
            known = len(have) - offset
            assert have[offset : offset + count] == row_ids[:known], "a repeat says something else"
            have += row_ids[known:]
            self.logprobs.setdefault(number, []).extend(row_logprobs[known:])
            self.versions.setdefault(number, []).extend([deltas.version] * (count - min(known, count)))
            if row["finish"]:
                self.finish[number] = int(row["finish"])
        return gaps


Event = tuple[str, int]
events = st.lists(
    st.tuples(
        st.sampled_from(["token", "token", "token", "tick", "tick", "lose", "reconnect", "version"]), st.integers(0, 3)
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(events, st.integers(1, 9))
def test_every_token_arrives_once_whatever_is_lost(schedule: list[Event], width: int) -> None:
    book, receiver, made = TokenBook(), Receiver(), {n: [] for n in range(4)}
    now, version, versions = 0.0, 0, {n: [] for n in range(4)}
    for number in made:
        assert book.open(assign(number)) is not None
        assert book.open(assign(number)) is None, "a repeated Assign changes nothing"

    def deliver(frames: list[Deltas]) -> None:
        for frame in frames:
            for number, offset in receiver.take(frame).items():
                book.resend(number, offset, now)
            book.keep(frame.seq)

    for kind, number in schedule:
        now += DELTA_S
        if kind == "token":
            ids = [len(made[number]) + i for i in range(width)]
            made[number] += ids
            versions[number] += [version] * width
            assert book.add(number, chunk(ids, version), now)
        elif kind == "tick":
            deliver(book.pack(now, DELTA_S))
        elif kind == "lose":
            book.pack(now, DELTA_S, flush=True)
        elif kind == "reconnect":
            book.reconnect(now)
        elif kind == "version":
            version += 1
    for number in made:
        assert book.add(number, chunk([], version, Finish.STOP), now)
        assert not book.add(number, chunk([7], version), now), "nothing after the end"
    book.reconnect(now)
    deliver(book.pack(now, DELTA_S))
    deliver(book.pack(now, DELTA_S, flush=True))
    assert receiver.ids == made
    assert receiver.versions.items() >= {n: v for n, v in versions.items() if v}.items()
    assert all(receiver.logprobs.get(n, []) == [-0.25 * token for token in ids] for n, ids in made.items())
    assert receiver.finish == dict.fromkeys(made, FINISH_CODES.index("stop"))
    assert not book.streams, "what the manager has is forgotten"
    assert book.has_room()


def test_a_kept_answer_from_before_a_resend_keeps_nothing() -> None:
    book = TokenBook()
    book.open(assign(1))
    book.add(1, chunk([10, 11, 12], finish=Finish.LENGTH), 0.0)
    (frame,) = book.pack(0.0, DELTA_S)
    book.resend(1, 0, 0.1)
    book.keep(frame.seq)
    assert [held.length for held in book.held()] == [3]
    (again,) = book.pack(0.2, DELTA_S)
    assert (again.rows, again.ids) == (frame.rows, frame.ids)
    book.keep(again.seq)
    assert not book.streams


def test_positions_are_those_of_the_response() -> None:
    book = TokenBook()
    book.open(assign(5, offset=100))
    book.add(5, chunk([1, 2]), 0.0)
    (frame,) = book.pack(0.0, DELTA_S, flush=True)
    assert np.frombuffer(frame.rows, dtype=ROW_DTYPE).tolist() == [(5, 100, 2, 0)]
    assert book.held()[0].length == 102
    assert book.streams[5].input_ids() == [1, 2, 3, 1, 2]


def test_a_lone_token_waits_for_company_but_not_for_long() -> None:
    book = TokenBook()
    book.open(assign(1))
    book.add(1, chunk([10]), 0.0)
    assert book.pack(0.03, DELTA_S) == []
    assert book.has_unsent()
    longest = GATHER_PERIODS * DELTA_S
    assert len(book.pack(longest, DELTA_S)) == 1
    assert longest < LedgerConfig(run_epoch=1).beat_s, "or waiting would look like silence"
    book.add(1, chunk([11], finish=Finish.STOP), longest)
    assert len(book.pack(longest, DELTA_S)) == 1, "an end does not wait"


@given(st.integers(6, 64), st.integers(2, 8), st.integers(1, 40))
def test_bytes_per_token_stay_below_the_goal(streams: int, per_tick: int, ticks: int) -> None:
    book, sent = TokenBook(), 0
    for number in range(streams):
        book.open(assign(number))
    for tick in range(ticks):
        now = tick * DELTA_S
        for number in range(streams):
            book.add(number, chunk([tick] * per_tick), now)
        sent += sum(len(encode(frame)) for frame in book.pack(now, DELTA_S))
    assert not book.has_unsent()
    assert sent <= GOAL_BYTES * streams * per_tick * ticks


@given(st.integers(6, 64), st.integers(1, 10), st.booleans())
def test_a_slow_engine_costs_no_more_bytes_per_token(streams: int, ticks_per_token: int, staggered: bool) -> None:
    """A large model, or a small one on a busy core: down to three tokens of a sample in a second."""
    book, sent, tokens = TokenBook(), 0, 0
    for number in range(streams):
        book.open(assign(number))
    for tick in range(20 * ticks_per_token):
        for number in range(streams):
            if (tick + staggered * number) % ticks_per_token == 0:
                book.add(number, chunk([tick]), tick * DELTA_S)
        for frame in book.pack(tick * DELTA_S, DELTA_S):
            sent += len(encode(frame))
            tokens += len(frame.ids) // 4
    assert tokens >= 16 * streams, "what waits is a token or two of each"
    assert sent <= GOAL_BYTES * tokens


def test_a_row_holds_what_its_count_can_say() -> None:
    book, receiver = TokenBook(), Receiver()
    book.open(assign(1))
    ids = list(range(3 * MAX_ROW_TOKENS + 5))
    book.add(1, chunk(ids, finish=Finish.LENGTH), 0.0)
    for frame in book.pack(0.0, DELTA_S):
        assert receiver.take(frame) == {}
    assert receiver.ids[1] == ids
    assert receiver.finish == {1: FINISH_CODES.index("length")}


def test_the_reserve_of_a_notice() -> None:
    assert [reserve_of(notice) for notice in (0.0, -1.0, 2.0, 8.0, 120.0)] == [0.0, 0.0, 0.5, 2.0, 2.0]


def test_a_frame_has_no_more_rows_than_the_manager_takes() -> None:
    book = TokenBook()
    for number in range(MAX_ROWS + 5):
        book.open(assign(number))
        book.add(number, chunk([7]), 0.0)
    frames = book.pack(0.0, DELTA_S, flush=True)
    assert [len(frame.rows) // ROW_DTYPE.itemsize for frame in frames] == [MAX_ROWS, 5]
