"""The agent's side of its protocol with the manager, as plain state: no sockets, no clock, no engine.

`AgentProtocol` says which messages count, does what they ask of the tokens that are held, and makes the answers.
Whoever drives it brings the rest: the real agent (`conversation`, `app`), and in tests the simulated ones.

`TokenBook` holds what the engine generated, and how much of it the manager has: exact under any loss or repeat. Every
live assignment keeps all its tokens until the manager has them and its end, so any Resend can be answered and a stream
can go on after a weight switch. What is over leaves its text, within bounds: the sample's next turn begins with it, and
an Assign that comes back here need not repeat it. A frame goes out when it is worth its overhead (GOAL_BYTES per
token), when something in it ended, or when its oldest token has waited GATHER_PERIODS delta periods.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec.structs import replace

from polyrl import wire
from polyrl.wire import (
    FINISH_CODES,
    MAX_ROWS,
    ROW_DTYPE,
    TOKEN_BYTES,
    Assign,
    Deltas,
    HandBack,
    HandBackReason,
    HeldAssignment,
    PrefixUnknown,
    checksum_of,
    unpack_ids,
)
from polyrl_rollout.engines.port import TokenChunk

FRAME_BYTES: Final = 24
"""A Deltas frame without its columns: tag, seq, version, three lengths."""
GOAL_BYTES: Final = 16
"""Bytes per generated token, all overhead included, that a frame stays below unless it is urgent."""
MIN_ROW_TOKENS: Final = 2
"""A row of one token costs 19 bytes; it waits for a second one."""
GATHER_PERIODS: Final = 20
"""Delta periods that a token waits at most for others to travel with: 0.6 s, below a heartbeat. Only streams slower
than two tokens in that time wait so long, and what a kill costs is counted in tokens: one of each, or four of a lone
one."""
MAX_ROW_TOKENS: Final = 0xFFFF
"""A row counts its tokens in 16 bits."""
MAX_FRAME_TOKENS: Final = 1 << 18
"""2 MiB of tokens, a row counted as two: what piled up without a manager goes out in several frames."""
MAX_UNKEPT_TOKENS: Final = 1 << 22
"""32 MiB of tokens that the manager does not have; above it streams are not read on."""
MAX_TEXT_TOKENS: Final = 1 << 24
"""64 MiB of finished turns' texts that the next turns may begin with: 500 of 32k tokens. The oldest go first."""
MAX_FENCED: Final = 3


@dataclass(eq=False)
class Stream:
    """One assignment. Positions are response positions of its sample."""

    assign: Assign
    sent: int
    kept: int
    ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first position, version), one entry per change."""
    finish: int = 0
    """Index into FINISH_CODES; not 0 once the engine ended the turn."""
    finish_sent: bool = False
    finish_kept: bool = False
    waits_since: float | None = None
    """When the oldest unsent token came."""
    leaves: bool = False
    """The sample is being given back: not to be generated here any more."""
    given_back: HandBack | None = None
    """How the sample was given back, or will be at the next Welcome. It is held until the manager has its tokens, which
    may be lost with the connection, and this message with them."""

    @property
    def length(self) -> int:
        """Position after the newest token."""
        return self.assign.offset + len(self.ids)

    @property
    def remaining(self) -> int:
        """Tokens of the budget that are left."""
        return self.assign.max_new_tokens - len(self.ids)

    @property
    def unsent(self) -> int:
        return self.length - self.sent

    def input_ids(self) -> list[int]:
        """Everything the engine needs to generate on: what was assigned and what came since."""
        return [*unpack_ids(self.assign.input_ids).tolist(), *self.ids]

    def turn_ids(self) -> list[int]:
        """What the turn holds."""
        ids = self.input_ids()
        return ids[len(ids) - (self.length - self.assign.turn_start) :]


@dataclass(frozen=True)
class _Piece:
    """A row to be: positions [begin, end) of a stream, all of one version."""

    stream: Stream
    version: int
    begin: int
    end: int
    finish: int


@dataclass(frozen=True)
class _InFlight:
    seq: int
    sent_at: float
    ends: list[tuple[int, int, bool]]
    """(assignment, position after the row, whether the row carried the finish)."""


class TokenBook:
    """All streams of one engine."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._texts: dict[str, bytes] = {}
        """uint32: prompt and response of samples whose turn ended here, oldest first."""
        self._text_bytes = 0
        self.seq = 0
        """Number of the newest frame that was packed."""
        self.newest = 0
        """The newest assignment that has come since the manager's last Welcome, 0: none."""
        self._unkept = 0

    def open(self, assign: Assign) -> Stream | None:
        """A stream for a new assignment; None when it is known already."""
        self.newest = max(self.newest, assign.assignment)
        if assign.assignment in self.streams:
            return None
        stream = Stream(assign, assign.offset, kept=assign.offset)
        self.streams[assign.assignment] = stream
        return stream

    def completed(self, assign: Assign) -> Assign | None:
        """The assignment with the text that it leaves out; None when that is not here."""
        if not assign.base:
            return assign
        prefix = self._texts.get(assign.sample, b"")[: 4 * assign.base]
        if len(prefix) < 4 * assign.base or checksum_of(prefix) != assign.base_check:
            return None
        return replace(assign, input_ids=prefix + assign.input_ids, base=0, base_check=0)

    def _keep_text(self, stream: Stream) -> None:
        self._forget_text(stream.assign.sample)
        text = stream.assign.input_ids + np.asarray(stream.ids, "<u4").tobytes()
        self._texts[stream.assign.sample] = text
        self._text_bytes += len(text)
        while self._text_bytes > 4 * MAX_TEXT_TOKENS:
            self._forget_text(next(iter(self._texts)))

    def _forget_text(self, sample: str) -> None:
        self._text_bytes -= len(self._texts.pop(sample, b""))

    def add(self, assignment: int, chunk: TokenChunk, now: float) -> bool:
        """Takes new tokens; False when the assignment is no longer wanted."""
        stream = self.streams.get(assignment)
        if stream is None or stream.finish or stream.given_back:
            return False
        if chunk.ids or not stream.versions:
            if not stream.versions or stream.versions[-1][1] != chunk.version:
                stream.versions.append((stream.length, chunk.version))
            stream.ids.extend(chunk.ids)
            stream.logprobs.extend(chunk.logprobs)
            self._unkept += len(chunk.ids)
        if chunk.finish is not None:
            stream.finish = FINISH_CODES.index(chunk.finish.value)
        if stream.waits_since is None:
            stream.waits_since = now
        return True

    def forget(self, assignment: int) -> Stream | None:
        """Drops an assignment with all its tokens."""
        stream = self.streams.pop(assignment, None)
        if stream is not None:
            self._unkept -= stream.length - stream.kept
        return stream

    def settle(self, assignment: int) -> None:
        """Drops one that was given back if the manager has all its tokens."""
        stream = self.streams.get(assignment)
        if stream is not None and stream.given_back and stream.kept == stream.length:
            self.forget(assignment)

    def clear(self) -> None:
        """Drops everything."""
        self.streams.clear()
        self._in_flight.clear()
        self._texts.clear()
        self._unkept = self._text_bytes = 0

    def keep(self, seq: int) -> None:
        """The manager has everything up to frame `seq`."""
        while self._in_flight and self._in_flight[0].seq <= seq:
            for assignment, end, finish in self._in_flight.popleft().ends:
                stream = self.streams.get(assignment)
                if stream is None:
                    continue
                self._unkept -= max(0, end - stream.kept)
                stream.kept = max(stream.kept, end)
                stream.finish_kept |= finish
                if stream.finish_kept and stream.kept == stream.length:
                    self._keep_text(self.streams.pop(assignment))
                self.settle(assignment)

    def resend(self, assignment: int, offset: int, now: float) -> None:
        """The manager misses this assignment's tokens from `offset` on; what is under way of it does not count."""
        stream = self.streams.get(assignment)
        if stream is None:
            return
        for frame in self._in_flight:
            frame.ends[:] = [end for end in frame.ends if end[0] != assignment]
        self._unkept += stream.kept
        stream.sent = stream.kept = min(max(offset, stream.assign.offset), stream.length)
        self._unkept -= stream.kept
        stream.finish_sent = stream.finish_kept = False
        stream.waits_since = now if stream.unsent or stream.finish else None

    def reconnect(self, now: float) -> None:
        """What was under way may be lost: all that the manager is not known to have is unsent again."""
        self._in_flight.clear()
        self.newest = max(self.streams, default=0)
        for assignment, stream in self.streams.items():
            self.resend(assignment, stream.kept, now)

    def held(self) -> tuple[HeldAssignment, ...]:
        """For Hello."""
        return tuple(
            HeldAssignment(number, stream.assign.sample, attempt=stream.assign.attempt, length=stream.length)
            for number, stream in self.streams.items()
        )

    def versions(self) -> tuple[int, ...]:
        """Weight versions that made what is held, for Hello."""
        return tuple(sorted({version for stream in self.streams.values() for _, version in stream.versions}))

    def leave(self, assignment: int) -> None:
        """The assignment will be given back: nothing starts it again."""
        if assignment in self.streams:
            self.streams[assignment].leaves = True

    def is_unfinished(self, assignment: int) -> bool:
        """Whether it is here, neither ended by the engine nor given back."""
        stream = self.streams.get(assignment)
        return stream is not None and not stream.finish and not stream.given_back

    def unfinished(self) -> list[Stream]:
        return [self.streams[number] for number in self.streams if self.is_unfinished(number)]

    def text_tokens(self) -> int:
        """Prompts and responses of all that runs here as far as the manager can know: also of what has ended since."""
        known = (stream for stream in self.streams.values() if not (stream.finish_sent or stream.given_back))
        return sum(len(stream.assign.input_ids) // 4 + len(stream.ids) for stream in known)

    def has_unsent(self) -> bool:
        return any(_is_pending(stream) for stream in self.streams.values())

    def has_room(self) -> bool:
        """False when the manager lacks so many tokens that streams must wait."""
        return self._unkept < MAX_UNKEPT_TOKENS

    def oldest_unanswered(self) -> float | None:
        """When the oldest frame that was not answered left."""
        return self._in_flight[0].sent_at if self._in_flight else None

    def pack(self, now: float, delta_s: float, *, flush: bool = False) -> list[Deltas]:
        """The frames to send now, marked as under way; with `flush` everything, worth it or not."""
        pending = [stream for stream in self.streams.values() if _is_pending(stream)]
        urgent_before = now - GATHER_PERIODS * delta_s
        urgent = any(flush or _is_urgent(stream, urgent_before) for stream in pending)
        ripe = [s for s in pending if flush or s.unsent >= MIN_ROW_TOKENS or _is_urgent(s, urgent_before)]
        if not urgent and not _is_worth_it([stream.unsent for stream in ripe]):
            return []
        return [self._frame(pieces, now) for pieces in _frames(piece for s in ripe for piece in _pieces(s))]

    def _frame(self, pieces: list[_Piece], now: float) -> Deltas:
        rows = np.zeros(len(pieces), dtype=ROW_DTYPE)
        ids, logprobs, ends = array("I"), array("f"), []
        for index, piece in enumerate(pieces):
            stream, number, base = piece.stream, piece.stream.assign.assignment, piece.stream.assign.offset
            rows[index] = (number, piece.begin, piece.end - piece.begin, piece.finish)
            ids += stream.ids[piece.begin - base : piece.end - base]
            logprobs += stream.logprobs[piece.begin - base : piece.end - base]
            ends.append((number, piece.end, piece.finish != 0))
            stream.sent, stream.finish_sent, stream.waits_since = piece.end, piece.finish != 0, None
        self.seq += 1
        self._in_flight.append(_InFlight(self.seq, now, ends=ends))
        packed_ids, packed_logprobs = np.asarray(ids, "<u4").tobytes(), np.asarray(logprobs, "<f4").tobytes()
        version = pieces[0].version
        return Deltas(self.seq, version, rows=rows.tobytes(), ids=packed_ids, logprobs=packed_logprobs)


class AgentProtocol:
    """One agent's; `welcome` is None until the manager has answered the greeting."""

    def __init__(self) -> None:
        self.book = TokenBook()
        self.welcome: wire.Welcome | None = None
        self.draining = False
        self._fenced = 0

    @property
    def is_rejected(self) -> bool:
        """Fenced so often in a row that greeting again is in vain."""
        return self._fenced >= MAX_FENCED

    def counts(self, message: wire.ToAgent) -> bool:
        """Before the greeting is answered everything else was meant for a former connection of this name; only what
        settles held assignments always holds."""
        return self.welcome is not None or isinstance(message, wire.Welcome | wire.Fenced | wire.Resend | wire.Cancel)

    def receive(self, message: wire.ToAgent, now: float) -> None:
        """Does what a message asks of what is held; engines, weights and drains are the driver's."""
        match message:
            case wire.Welcome():
                self.welcome, self._fenced = message, 0
                self.book.reconnect(now)
            case wire.Fenced(lease_over=True):
                self.welcome = None
            case wire.Fenced():
                self.welcome = None
                self._fenced += 1
                self.book.clear()
            case wire.TokensKept(seq):
                self.book.keep(seq)
            case wire.Resend(assignment, offset):
                self.book.resend(assignment, offset, now)
                if self.welcome is not None:  # else the HandBack is lost, too
                    self.book.settle(assignment)
            case wire.Cancel(assignment):
                self.book.forget(assignment)
            case wire.Recall(assignment):
                # At once: a weight switch that ends meanwhile would start the sequence again.
                self.book.leave(assignment)

    def disconnect(self) -> None:
        """The connection is gone; the next one greets anew."""
        self.welcome = None

    def accept(
        self, assign: Assign, version: int, *, switching: bool = False
    ) -> Stream | HandBack | PrefixUnknown | None:
        """The stream to generate, its text complete; or the answer why not; or None for one that is known already.
        `version`: the weights that the engine serves; `switching`: it is about to serve others."""
        if self.draining:
            return HandBack(assign.assignment, HandBackReason.DRAINING, detail="the engine drains")
        if switching or not assign.min_version <= version <= assign.max_version:
            detail = f"the engine serves version {version}"
            return HandBack(assign.assignment, HandBackReason.VERSION_CHANGED, detail=detail)
        if assign.max_new_tokens < 1:
            return HandBack(assign.assignment, HandBackReason.REJECTED, detail="its token budget is used up")
        completed = self.book.completed(assign)
        return PrefixUnknown(assign.assignment) if completed is None else self.book.open(completed)

    def hand_back(self, assignment: int, reason: HandBackReason, detail: str = "") -> HandBack | None:
        """Gives up an assignment, whose tokens must have been sent before. None when it is not held, or given back
        already; or when nobody listens: then it is `undelivered`."""
        stream = self.book.streams.get(assignment)
        if stream is None or stream.given_back:
            return None
        stream.leaves, stream.given_back = True, HandBack(assignment, reason, detail=detail)
        if self.welcome is None:
            return None
        self.book.settle(assignment)
        return stream.given_back

    def undelivered(self) -> list[HandBack]:
        """What is to be handed back, again or at last, now that somebody listens."""
        streams = [stream for stream in self.book.streams.values() if stream.given_back]
        undelivered = [stream.given_back for stream in streams if stream.given_back]
        for stream in streams:
            stream.given_back = None
        return undelivered


def _is_pending(stream: Stream) -> bool:
    return stream.unsent > 0 or (stream.finish != 0 and not stream.finish_sent)


def _is_urgent(stream: Stream, before: float) -> bool:
    return stream.finish != 0 or (stream.waits_since is not None and stream.waits_since <= before)


def _is_worth_it(counts: list[int]) -> bool:
    tokens = sum(counts)
    cost = FRAME_BYTES + ROW_DTYPE.itemsize * len(counts) + TOKEN_BYTES * tokens
    return tokens > 0 and cost <= GOAL_BYTES * tokens


def _pieces(stream: Stream) -> Iterator[_Piece]:
    """The unsent part, cut where the version changes and where a row is full; the last one carries the finish."""
    bounds = [begin for begin, _ in stream.versions if begin > stream.sent]
    cuts = sorted({stream.sent, *bounds, *range(stream.sent, stream.length, MAX_ROW_TOKENS), stream.length})
    spans = list(itertools.pairwise(cuts)) or [(stream.length, stream.length)]
    for begin, end in spans:
        version = next(version for first, version in reversed(stream.versions) if first <= begin)
        yield _Piece(stream, version, begin=begin, end=end, finish=stream.finish if end == stream.length else 0)


def _frames(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one version each, oldest version first, at most MAX_FRAME_TOKENS together, and MAX_ROWS."""
    frame: list[_Piece] = []
    tokens = 0
    for piece in sorted(pieces, key=lambda piece: piece.version):
        size = piece.end - piece.begin + 2
        full = tokens + size > MAX_FRAME_TOKENS or len(frame) >= MAX_ROWS
        if frame and (piece.version != frame[0].version or full):
            yield frame
            frame, tokens = [], 0
        frame.append(piece)
        tokens += size
    if frame:
        yield frame
