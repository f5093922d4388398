"""What a run's history is made of: small typed records without a token in them, kept for the whole run.

Each record is about one thing (`about`): a sample `12.3`, a group `12`, `batch 5`, `engine rollout-0`, or the `run`.
Tokens appear as pieces, (first position, end, version) per unbroken stretch, once per assignment: so their number
follows assignments, not tokens, and a gap or an overlap still shows. In bytes a MessagePack map with a `kind` (JSON
has no word for a metric that is not a number) and its checksum: SQLite would hand on a flipped bit as history.

Refuses to hold: how records come about (see `history`), what they must fulfil (see `audit`). Read next: `history`.
"""

from __future__ import annotations

import zlib
from typing import Final, TypeAlias

import msgspec

from polyrl.ledger.config import LedgerConfig
from polyrl.sample import DiscardReason, Finish, Pool, Purpose, split_sample_id

CHECKSUM_BYTES: Final = 4

RUN: Final = "run"
"""What records are about that are about nothing smaller."""

Piece: TypeAlias = tuple[int, int, int]
"""Response positions start <= p < end, and the weight version that made them."""


class Record(
    msgspec.Struct, frozen=True, tag_field="kind", tag=lambda name: name[0].lower() + name[1:], rename="camel"
):
    """One thing that happened, at `at` on the ledger's clock."""

    at: float

    @property
    def about(self) -> str:
        """What it is filed under."""
        return RUN


class _OfSample(Record, frozen=True):
    sample: str

    @property
    def about(self) -> str:
        return self.sample


class _OfGroup(Record, frozen=True):
    group: int

    @property
    def about(self) -> str:
        return str(self.group)


class _OfBatch(Record, frozen=True):
    batch: int

    @property
    def about(self) -> str:
        return about_batch(self.batch)


class _OfEngine(Record, frozen=True):
    engine: str

    @property
    def about(self) -> str:
        return f"engine {self.engine}"


# --- the run ----------------------------------------------------------------------------------------------------------


class Began(Record, frozen=True):
    """A manager took the run up, at the beginning or again."""

    wall: float
    """Unix seconds."""
    config: LedgerConfig


class Renewed(Record, frozen=True):
    """The manager had been away; silence and lateness before this moment count against nobody."""


class Published(Record, frozen=True):
    """A weight version can be pulled."""

    version: int


class Stray(Record, frozen=True):
    """Tokens were taken for an assignment that was not running. A correct ledger never writes this."""

    assignment: int
    tokens: int


class Unanswered(Record, frozen=True):
    """A request for a batch ended without one: late, refused, or asked anew."""

    request: int
    asked_at: float
    due: float


class NumbersTaken(Record, frozen=True):
    """Peers knew of groups, batches and assignments below these numbers, of which this journal knows nothing."""

    group: int
    batch: int
    assignment: int


class TrainerCame(Record, frozen=True):
    """A trainer's process greeted, for the first time or again."""

    trainer: str


class Window(Record, frozen=True):
    """Reserved engines may generate from now on, or no longer; how long at most what they have to do takes them."""

    open: bool
    token_s: float
    """Seconds per token on the slowest of them when it is full; 0: not measured."""
    read_s: float
    """Seconds per token to read on the slowest of them, for all that it runs together."""


class Finished(Record, frozen=True):
    """The trainer's last words."""

    ok: bool
    message: str


# --- engines ----------------------------------------------------------------------------------------------------------


class Greeted(_OfEngine, frozen=True):
    """It joined, or greeted again."""

    pool: Pool
    max_running: int
    version: int


class Serving(_OfEngine, frozen=True):
    """It serves `version`, verified; -1: nothing."""

    version: int


class Struck(_OfEngine, frozen=True):
    """It failed and pauses."""

    cause: str
    until: float


class Trusted(_OfEngine, frozen=True):
    """It was far slower than the others, and gets work like any other again."""

    cause: str


class Draining(_OfEngine, frozen=True):
    """It gets nothing new."""

    reason: str
    drain_at: float


class Gone(_OfEngine, frozen=True):
    """Its lease is over."""

    cause: str
    heard_at: float
    """Its last sign of life."""


# --- groups and batches -----------------------------------------------------------------------------------------------


class Submitted(_OfGroup, frozen=True):
    """The trainer wants n samples."""

    n: int
    step: int
    purpose: Purpose
    prompt_tokens: int
    max_new_tokens: int
    min_version: int
    max_version: int


class Completed(_OfGroup, frozen=True):
    """All its samples are scored, and it passed the filter."""


class Packed(_OfGroup, frozen=True):
    """It is part of a batch."""

    batch: int


class Discarded(_OfGroup, frozen=True):
    """None of its samples will be trained: `culprit` for `reason`, its siblings as groupIncomplete; without a culprit
    all for `reason`."""

    culprit: str
    reason: DiscardReason
    detail: str


class Batched(_OfBatch, frozen=True):
    """A request was answered with these groups."""

    request: int
    step: int
    purpose: Purpose
    min_samples: int
    max_samples: int
    groups: list[int]
    last: bool
    asked_at: float
    due: float


class Acknowledged(_OfBatch, frozen=True):
    """It is part of the trainer's state."""


class Unpacked(_OfBatch, frozen=True):
    """The trainer that got it ended before it acknowledged it; its groups are offered again."""


# --- samples ----------------------------------------------------------------------------------------------------------


class Assigned(_OfSample, frozen=True):
    """It goes to an engine, which serves `version`."""

    assignment: int
    engine: str
    version: int


class _OfAssignment(_OfSample, frozen=True):
    assignment: int
    """0: none was running, the turn was found to be over."""
    engine: str
    pieces: list[Piece]
    """The tokens that this assignment brought."""


class Moved(_OfAssignment, frozen=True):
    """The assignment ended unfinished; the sample waits again."""

    cause: str


class TurnEnded(_OfAssignment, frozen=True):
    """The engine's part of a turn is over."""

    finish: Finish


class Cut(_OfAssignment, frozen=True):
    """The assignment ended because its group was discarded."""


class Extended(_OfSample, frozen=True):
    """An environment wrote this many tokens; another turn begins."""

    tokens: int


class Scored(_OfSample, frozen=True):
    """The verdict."""

    reward: float
    metrics: dict[str, float]


OfAssignment: TypeAlias = Moved | TurnEnded | Cut
OfLease: TypeAlias = Serving | Struck | Trusted | Draining | Gone | Assigned
AnyRecord: TypeAlias = (
    Began
    | Renewed
    | Published
    | Stray
    | Unanswered
    | NumbersTaken
    | TrainerCame
    | Window
    | Finished
    | Greeted
    | Serving
    | Struck
    | Trusted
    | Draining
    | Gone
    | Submitted
    | Completed
    | Packed
    | Discarded
    | Batched
    | Acknowledged
    | Unpacked
    | Assigned
    | Moved
    | TurnEnded
    | Cut
    | Extended
    | Scored
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def about_batch(batch: int) -> str:
    """What records of a batch are filed under."""
    return f"batch {batch}"


def abouts_of(sample: str) -> tuple[str, str]:
    """What records that concern a sample are filed under; its batch comes on top. Raises ValueError for no sample."""
    group, _ = split_sample_id(sample)
    return sample, str(group)


def encode_record(record: Record) -> bytes:
    """As a MessagePack map and its CRC-32."""
    body = _encoder.encode(record)
    return body + zlib.crc32(body).to_bytes(CHECKSUM_BYTES)


def decode_record(data: bytes) -> AnyRecord:
    """Raises ValueError when it is none."""
    body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if zlib.crc32(body).to_bytes(CHECKSUM_BYTES) != checksum:
        raise ValueError("the checksum of a record does not match")
    return _decoder.decode(body)
