"""Tokens in. A row counts only for a live assignment of the engine that sent it, of a version that both the sample may
use and the engine has verified; what is here already is left out, what is missing is asked for again: after a frame
that never came, which `seq` shows, the rest of all that its engine runs.

Almost every frame is in order. For it one loop of comparisons decides, and the event carries the frame's own bytes;
only a frame with a surprise is taken apart row by row. What no model can have sampled (see `sampled`) is refused, and
its engine pauses: one such id would end a learner, one such logprob would spoil it.
"""

from __future__ import annotations

from math import inf
from typing import Final

from msgspec.structs import replace

from polyrl import wire
from polyrl.errors import ProtocolError
from polyrl.ledger import speed
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.events import FollowUp, GapSeen, TokensTaken
from polyrl.ledger.messages.sampled import can_be_sampled
from polyrl.ledger.scheduling.moves import already_over, end_turn, move, quarantine
from polyrl.ledger.state import Assignment, LeasedEngine
from polyrl.ledger.transition import Transition
from polyrl.sample import Finish
from polyrl.wire import Deltas, RowColumns

STOP: Final = wire.FINISH_CODES.index("stop")


def take_deltas(transition: Transition, engine: LeasedEngine, message: Deltas) -> None:
    """Accepts what can be accepted; answers TokensKept unless tokens are missing."""
    try:
        wire.check_deltas(message)
    except ProtocolError:
        transition.ignore("malformedDeltas")
        return
    columns = wire.row_columns(message.rows)
    taken = TokensTaken(
        engine=engine.name,
        seq=message.seq,
        version=message.version,
        rows=message.rows,
        ids=message.ids,
        logprobs=message.logprobs,
        frame_bytes=len(message.rows) + len(message.ids) + len(message.logprobs),
        in_vain=0,
        repeated=0,
        at=transition.now,
    )
    frames_lost, as_known = 0 <= engine.seq < message.seq - 1, engine.step_scale
    can_be = can_be_sampled(message.ids, message.logprobs, transition.state.weights.vocabulary)
    ends = _ends_if_in_order(transition, engine, message.version, columns) if can_be else None
    trouble: list[tuple[int, MoveCause]] = []
    if ends is not None:
        transition.record(taken)
    else:
        sift = _Sift(transition, engine, message, can_be=can_be)
        for number, offset, count, finish in zip(*columns, strict=True):
            sift.row(number, offset, count=count, finish=finish)
        transition.record(sift.accepted(taken))
        sift.ask_for_gaps()
        ends, trouble = sift.ends, sift.trouble
    if not speed.is_about(engine.step_scale, as_known):  # what runs there may be better off elsewhere
        transition.follow_ups |= FollowUp.PLACE
    for number, finish in ends:
        _end(transition, number, finish)
    for number, cause in trouble:
        _fail(transition, number, cause)
    if frames_lost:
        # What they held, nobody knows; the agent would take this frame's receipt for theirs, and forget it.
        for number in engine.running:
            transition.send(engine.name, wire.Resend(number, transition.state.assignments[number].length))
    if not engine.gaps:
        # TokensKept covers all earlier frames, the one that is missing too.
        transition.send(engine.name, wire.TokensKept(message.seq))


def _ends_if_in_order(
    transition: Transition, engine: LeasedEngine, version: int, columns: RowColumns
) -> list[tuple[int, int]] | None:
    """The (assignment, finish code) that end with this frame; None if any row is not exactly what was expected."""
    numbers, offsets, counts, finishes = columns
    if version not in engine.served or len(set(numbers)) != len(numbers):
        return None
    live, name, ends = transition.state.assignments, engine.name, []
    for number, offset, count, finish in zip(numbers, offsets, counts, finishes, strict=True):
        assignment = live.get(number)
        if (
            assignment is None
            or assignment.length != offset
            or assignment.engine != name
            or not assignment.low <= version <= assignment.high
        ):
            return None
        end = offset + count
        if finish or end >= assignment.limit:
            if end > assignment.limit:
                return None
            ends.append((number, finish))
    return ends


class _Sift:
    """Takes a frame apart row by row: every row is trimmed, refused, or asked for again on its own."""

    def __init__(self, transition: Transition, engine: LeasedEngine, message: Deltas, *, can_be: bool) -> None:
        self._transition = transition
        self._engine = engine
        self._message = message
        self._can_be = can_be
        """All of the frame's tokens can have been sampled."""
        self._begin = 0
        self._ahead: dict[int, bytearray] = {}
        """Per assignment, tokens of this frame already accepted: a frame may hold several rows of one."""
        self._closed: set[int] = set()
        """Assignments that end with this frame."""
        self._gaps: dict[int, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []
        self._ids = bytearray()
        self._logprobs = bytearray()
        self.in_vain = 0
        self.repeated = 0
        self.ends: list[tuple[int, int]] = []
        self.trouble: list[tuple[int, MoveCause]] = []

    def row(self, number: int, offset: int, count: int, finish: int) -> None:
        """Decides the next row of the frame."""
        begin, self._begin = self._begin, self._begin + 4 * count
        assignment = self._transition.state.assignments.get(number)
        if assignment is None or assignment.engine != self._engine.name or number in self._closed:
            self.in_vain += count
            return
        version = self._message.version
        if version not in self._engine.served or not assignment.low <= version <= assignment.high:
            self._refuse(number, count, MoveCause.WRONG_VERSION)
            return
        position = self._position(number, assignment)
        if offset > position:
            self._gaps.setdefault(number, position)
            self.in_vain += count
            return
        known = min(position - offset, count)
        if not self._can_be and not self._row_can_be(begin, self._begin):
            self._refuse(number, count, MoveCause.WRONG_TOKENS)
            return
        if not self._agrees(assignment, number, offset, begin, known) or (finish and offset + count < position):
            self._refuse(number, count, MoveCause.WRONG_TOKENS)
            return
        self.repeated += known
        self._accept(number, assignment, begin=begin + 4 * known, count=count - known, finish=finish)

    def accepted(self, taken: TokensTaken) -> TokensTaken:
        """`taken` with only what was accepted."""
        rows, ids, logprobs = wire.pack_rows(self._rows), bytes(self._ids), bytes(self._logprobs)
        refused = {"in_vain": self.in_vain, "repeated": self.repeated}
        return replace(taken, rows=rows, ids=ids, logprobs=logprobs, **refused)

    def ask_for_gaps(self) -> None:
        """Sends Resend for what is missing, unless it was asked for a moment ago."""
        for number, offset in self._gaps.items():
            if number in self._closed:
                continue
            if self._engine.gaps.get(number, -inf) + self._transition.config.gap_resend_s <= self._transition.now:
                self._transition.record(GapSeen(number, self._transition.now))
                self._transition.send(self._engine.name, wire.Resend(number, offset))

    def _position(self, number: int, assignment: Assignment) -> int:
        """Response position of the assignment's next token."""
        return assignment.length + (len(self._ahead.get(number, b"")) >> 2)

    def _refuse(self, number: int, count: int, cause: MoveCause) -> None:
        self.in_vain += count
        self._closed.add(number)
        self.trouble.append((number, cause))

    def _row_can_be(self, begin: int, end: int) -> bool:
        vocabulary = self._transition.state.weights.vocabulary
        return can_be_sampled(self._message.ids[begin:end], self._message.logprobs[begin:end], vocabulary)

    def _agrees(self, assignment: Assignment, number: int, offset: int, begin: int, known: int) -> bool:
        """Whether the tokens that are here already are the same: else this is another sequence."""
        if not known:
            return True
        # In two slices: a copy of the whole sample for each row would be quadratic, and a frame may have many rows.
        ids, stored = self._transition.state.samples[assignment.sample].ids, assignment.length
        earlier = ids[4 * offset : 4 * min(offset + known, stored)]
        ahead = self._ahead.get(number, b"")[4 * max(0, offset - stored) : 4 * max(0, offset + known - stored)]
        return earlier + ahead == self._message.ids[begin : begin + 4 * known]

    def _accept(self, number: int, assignment: Assignment, *, begin: int, count: int, finish: int) -> None:
        position = self._position(number, assignment)
        kept = min(count, assignment.limit - position)
        self.in_vain += count - kept
        end = begin + 4 * kept
        if kept:
            self._rows.append((number, position, kept, finish))
            self._ids += self._message.ids[begin:end]
            self._logprobs += self._message.logprobs[begin:end]
            self._ahead.setdefault(number, bytearray()).extend(self._message.ids[begin:end])
        over_budget = kept < count
        if finish or position + kept >= assignment.limit:
            self._closed.add(number)
            self.ends.append((number, 0 if over_budget else finish))


def _end(transition: Transition, number: int, finish: int) -> None:
    """The engine says that the turn is over, or the sample is as long as it may become there."""
    assignment = transition.state.assignments[number]
    if finish == STOP:
        end_turn(transition, assignment.sample, Finish.STOP)
    elif assignment.length < assignment.limit:
        _fail(transition, number, MoveCause.ENGINE_ERROR)
    else:
        # The last token that its limit allows may be a stop token whose finish is still on its way.
        over = already_over(transition, transition.state.samples[assignment.sample])
        if over is None:
            move(transition, number, MoveCause.OUTGROWN, cancel=not finish)
            return
        if not finish:
            transition.send(assignment.engine, wire.Cancel(number))
        end_turn(transition, assignment.sample, over)


def _fail(transition: Transition, number: int, cause: MoveCause) -> None:
    """The engine said something that cannot be: it pauses, and the sample goes on elsewhere."""
    quarantine(transition, transition.state.assignments[number].engine, cause)
    move(transition, number, cause)
