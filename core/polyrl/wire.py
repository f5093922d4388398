"""Everything PolyRL's processes say to each other, and how it looks in bytes.

One frame is one version byte and one msgpack array whose first item is the message's tag; no pickle, no names on the wire.
Four conversations: agent <-> manager, trainer <-> manager, agent <-> publisher. Every message is idempotent or carries
what makes it so: `request` (trainer), `assignment` and `offset` (tokens), `version` (weights), `epoch` (everything).

Fields are only ever appended with a default; a changed meaning takes a new tag. `decode_*` raise ProtocolError and nothing
else, whatever the bytes; callers count and drop. Durations are seconds from receipt, never wall-clock times: clocks differ.

Refuses to hold: sockets (shells own them), decisions (see `ledger`). Read next: `ledger`.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from polyrl.errors import ProtocolError
from polyrl.sample import DiscardReason, Group, Pool, Purpose, Response, SamplingParams, Scored

WIRE_VERSION: Final = 1
"""First byte of every frame; a peer of another version is refused at its first frame."""

MAX_FRAME_BYTES: Final = 64 << 20
"""Largest frame that is decoded: a group of 64 samples of 64k tokens is 50 MB; anything above is an attack or a bug."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag_field=None):
    """Base of all messages."""


# --- agent -> manager -------------------------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True, array_like=True):
    """An assignment the agent still generates or still holds tokens of, told when it greets again."""

    assignment: int
    sample: str
    attempt: int
    length: int
    """Response position after the last token that the agent holds."""


class Hello(_Message, frozen=True, tag="hello"):
    """First words of an agent, repeated after each reconnect; the manager answers Welcome or Fenced."""

    epoch: int
    engine: str
    """Unique for the life of this engine process (a pod UID, or a fresh random name on a laptop); never reused."""
    pool: Pool
    max_running: int
    """Sequences the engine runs at once; its credit when empty."""
    kv_tokens: int
    """KV-cache room, in tokens."""
    max_context: int
    """Longest prompt + response, in tokens."""
    weight_version: int
    """Verified version that the engine serves; -1 for none."""
    held: tuple[Held, ...] = ()


ROW_DTYPE: Final = np.dtype([("assignment", "<u4"), ("offset", "<u4"), ("count", "<u2"), ("finish", "u1")])
"""One row of Deltas: 11 bytes. `offset` is the response position of the row's first token; `finish` indexes FINISH_CODES."""

FINISH_CODES: Final = (None, "stop", "length")
"""Row finish codes: still running, ended by a stop token, ended by its token budget."""


class Deltas(_Message, frozen=True, tag="tok"):
    """New tokens of all running assignments since the last one, in columns; all made by one weight version."""

    seq: int
    """Counts up per connection greeting; answered by TokensKept."""
    version: int
    rows: bytes
    """ROW_DTYPE[R]"""
    ids: bytes
    """uint32[sum of rows.count]"""
    logprobs: bytes
    """float32[sum of rows.count]"""


class Beat(_Message, frozen=True, tag="beat"):
    """Sign of life and load, sent when nothing else was within the beat interval."""

    running: int
    queued: int
    kv_free_tokens: int


class Serving(_Message, frozen=True, tag="serving"):
    """The engine has loaded `version` and every checksum matched: samples may be placed on it."""

    version: int
    pull_seconds: float
    load_seconds: float
    bytes_pulled: int


class WeightsFailed(_Message, frozen=True, tag="wfail"):
    """The engine could not get or load `version`; it still serves `serving` (-1: nothing)."""

    version: int
    serving: int
    reason: str


class Returned(_Message, frozen=True, tag="returned"):
    """The engine gives an assignment back unfinished; its tokens so far were sent before. `reason` is one of RETURN_REASONS."""

    assignment: int
    reason: str
    detail: str = ""


RETURN_REASONS: Final = ("draining", "engineError", "rejected", "versionChanged", "cancelled")
"""Only `rejected` speaks of the sample itself (too long, malformed); the others are the engine's own affairs."""


class Leaving(_Message, frozen=True, tag="leaving"):
    """The agent was told (SIGTERM, metadata notice) that it ends within `deadline_s`; the manager drains it."""

    deadline_s: float
    reason: str


class Bye(_Message, frozen=True, tag="bye"):
    """Last words; nothing of this engine runs any more."""

    reason: str


# --- manager -> agent -------------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    """The agent is in; its lease runs from its last message."""

    epoch: int
    lease_s: float
    beat_s: float
    delta_s: float
    """How long the agent gathers tokens before it sends a Deltas."""


class Assign(_Message, frozen=True, tag="assign"):
    """Generate on: `input_ids` is the prompt and everything after it so far; the next token has response position `offset`."""

    assignment: int
    """Names (sample, attempt) towards this engine; never reused within an epoch."""
    sample: str
    attempt: int
    input_ids: bytes
    """uint32"""
    offset: int
    max_new_tokens: int
    """What is left of the sample's budget."""
    sampling: SamplingParams
    min_version: int
    max_version: int


class Cancel(_Message, frozen=True, tag="cancel"):
    """Stop and forget this assignment; no answer is expected, later rows of it are ignored."""

    assignment: int


class TokensKept(_Message, frozen=True, tag="kept"):
    """Deltas up to `seq` are safe; the agent may forget them."""

    seq: int


class Resend(_Message, frozen=True, tag="resend"):
    """A gap: send the assignment's tokens again from response position `offset`."""

    assignment: int
    offset: int


class Announce(_Message, frozen=True, tag="announce"):
    """A weight version exists; pull it from `endpoint` (CURVE server key `public_key`, Z85) and load it."""

    version: int
    endpoint: str
    public_key: str
    manifest_hash: bytes


class Drain(_Message, frozen=True, tag="drain"):
    """Finish or hand back everything before `deadline_s`, take nothing new, then say Bye."""

    deadline_s: float
    reason: str


class Fenced(_Message, frozen=True, tag="fenced"):
    """The sender belongs to another epoch, or its lease is over; it must stop what it runs and greet anew or end."""

    reason: str


# --- trainer -> manager -----------------------------------------------------------------------------------------------


class TrainerHello(_Message, frozen=True, tag="thello"):
    """First words of the trainer, repeated after each reconnect."""

    epoch: int
    acknowledged: int
    """Newest batch number that the trainer's state contains; -1 for none."""


class Submit(_Message, frozen=True, tag="submit"):
    """Generate these groups. A group number already known is ignored, so a repeat is harmless."""

    request: int
    groups: tuple[Group, ...]


class Score(_Message, frozen=True, tag="score"):
    """The loop host's verdict: the sample is finished and worth `reward`."""

    request: int
    sample: str
    turn: int
    reward: float
    metrics: dict[str, float] = {}  # noqa: RUF012 - msgspec copies mutable defaults


class Extend(_Message, frozen=True, tag="extend"):
    """The loop host's other verdict: an environment wrote `ids`; generate the next turn after them."""

    request: int
    sample: str
    turn: int
    """The turn that ended; the next one is turn + 1."""
    ids: bytes
    """uint32"""


class Reject(_Message, frozen=True, tag="reject"):
    """The loop host's last verdict: no reward can be had for this sample."""

    request: int
    sample: str
    reason: DiscardReason
    detail: str


class Next(_Message, frozen=True, tag="next"):
    """Ask for a batch of complete, scored groups of `step`; answered by Batch, or by Late after `deadline_s`.

    The answer holds at least `min_samples` unless fewer are left, and never more than `max_samples` samples or
    `max_tokens` tokens (one group may exceed max_tokens alone). Repeating a request that was answered repeats its answer.
    """

    request: int
    step: int
    purpose: Purpose
    min_samples: int
    max_samples: int
    max_tokens: int
    deadline_s: float


class Acknowledge(_Message, frozen=True, tag="ack"):
    """The batch is part of the trainer's state; its tokens may be forgotten."""

    request: int
    batch: int


class EndStep(_Message, frozen=True, tag="endstep"):
    """The trainer has all it needs of `step`: what is left of it is cancelled, with reason `surplus`."""

    request: int
    step: int
    purpose: Purpose


class PublishVersion(_Message, frozen=True, tag="publish"):
    """A new weight version can be pulled at `endpoint`."""

    request: int
    version: int
    endpoint: str
    public_key: str
    manifest_hash: bytes


class ReservedWindow(_Message, frozen=True, tag="window"):
    """Open: reserved engines may generate. Closed: they hand over what they run, if anyone else can take it."""

    request: int
    open: bool


class Report(_Message, frozen=True, tag="report"):
    """What the trainer wants seen in status: `phase` and named numbers. The newest one wins."""

    request: int
    phase: str
    step: int
    values: dict[str, float]


class Finish(_Message, frozen=True, tag="finish"):
    """The job is over; the manager cancels what is left, says Drain to all agents and ends."""

    request: int
    ok: bool
    message: str


# --- manager -> trainer -----------------------------------------------------------------------------------------------


class TrainerWelcome(_Message, frozen=True, tag="twelcome"):
    """The trainer is in; requests it still holds unanswered must be sent again."""

    epoch: int
    lease_s: float
    beat_s: float


class Accepted(_Message, frozen=True, tag="accepted"):
    """The request took effect (or had already)."""

    request: int


class Refused(_Message, frozen=True, tag="refused"):
    """The request cannot take effect; `reason` is one sentence."""

    request: int
    reason: str


class TurnDone(_Message, frozen=True, tag="turn"):
    """A turn of a sample has ended; answer with Score, Extend or Reject. Repeated until answered."""

    group: int
    index: int
    purpose: Purpose
    step: int
    response: Response


class Batch(_Message, frozen=True, tag="batch"):
    """Answer to Next: complete groups in arrival order. Empty with `last` when the step has nothing more to give."""

    request: int
    batch: int
    step: int
    samples: tuple[Scored, ...]
    last: bool
    """No further groups of this step and purpose exist: all are packed or discarded."""


class Late(_Message, frozen=True, tag="late"):
    """Answer to Next whose deadline passed; `waiting_for` names who is awaited, since when."""

    request: int
    waiting_for: str


class GroupDropped(_Message, frozen=True, tag="dropped"):
    """No sample of this group will be trained; the trainer may submit another in its place."""

    group: int
    step: int
    purpose: Purpose
    reason: DiscardReason
    detail: str


class TrainerBeat(_Message, frozen=True, tag="tbeat"):
    """Sign of life, in either direction."""


# --- agent <-> publisher ----------------------------------------------------------------------------------------------


class GetManifest(_Message, frozen=True, tag="getm"):
    """Ask for a version's manifest."""

    version: int


class GetChunk(_Message, frozen=True, tag="getc"):
    """Ask for one chunk by its content hash; outstanding requests are the puller's own credit."""

    version: int
    hash: bytes


class ManifestReply(_Message, frozen=True, tag="manifest"):
    """`body` is msgpack of weights.VersionManifest; empty when the version is no longer kept."""

    version: int
    body: bytes


class ChunkReply(_Message, frozen=True, tag="chunk"):
    """A chunk's bytes; empty when it is no longer kept."""

    hash: bytes
    data: bytes


FromAgent: TypeAlias = Hello | Deltas | Beat | Serving | WeightsFailed | Returned | Leaving | Bye
ToAgent: TypeAlias = Welcome | Assign | Cancel | TokensKept | Resend | Announce | Drain | Fenced
FromTrainer: TypeAlias = (
    TrainerHello
    | Submit
    | Score
    | Extend
    | Reject
    | Next
    | Acknowledge
    | EndStep
    | PublishVersion
    | ReservedWindow
    | Report
    | Finish
    | TrainerBeat
)
ToTrainer: TypeAlias = (
    TrainerWelcome | Accepted | Refused | TurnDone | Batch | Late | GroupDropped | Fenced | TrainerBeat
)
FromPuller: TypeAlias = GetManifest | GetChunk
ToPuller: TypeAlias = ManifestReply | ChunkReply

_encoder = msgspec.msgpack.Encoder()
_VERSION_BYTE: Final = bytes([WIRE_VERSION])


def encode(message: _Message) -> bytes:
    """One frame."""
    return _VERSION_BYTE + _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes | memoryview) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    if len(frame) < 2 or frame[0] != WIRE_VERSION:
        raise ProtocolError(f"not a frame of wire version {WIRE_VERSION}")
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"undecodable frame: {error}") from error


_from_agent = msgspec.msgpack.Decoder(FromAgent)
_to_agent = msgspec.msgpack.Decoder(ToAgent)
_from_trainer = msgspec.msgpack.Decoder(FromTrainer)
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)
_from_puller = msgspec.msgpack.Decoder(FromPuller)
_to_puller = msgspec.msgpack.Decoder(ToPuller)


def decode_from_agent(frame: bytes | memoryview) -> FromAgent:
    """Raises ProtocolError."""
    message: FromAgent = _decode(_from_agent, frame)
    if isinstance(message, Deltas):
        check_deltas(message)
    return message


def decode_to_agent(frame: bytes | memoryview) -> ToAgent:
    """Raises ProtocolError."""
    message: ToAgent = _decode(_to_agent, frame)
    return message


def decode_from_trainer(frame: bytes | memoryview) -> FromTrainer:
    """Raises ProtocolError."""
    message: FromTrainer = _decode(_from_trainer, frame)
    return message


def decode_to_trainer(frame: bytes | memoryview) -> ToTrainer:
    """Raises ProtocolError."""
    message: ToTrainer = _decode(_to_trainer, frame)
    return message


def decode_from_puller(frame: bytes | memoryview) -> FromPuller:
    """Raises ProtocolError."""
    message: FromPuller = _decode(_from_puller, frame)
    return message


def decode_to_puller(frame: bytes | memoryview) -> ToPuller:
    """Raises ProtocolError."""
    message: ToPuller = _decode(_to_puller, frame)
    return message


def check_deltas(deltas: Deltas) -> None:
    """Column lengths agree and finish codes exist. Raises ProtocolError."""
    if len(deltas.rows) % ROW_DTYPE.itemsize or len(deltas.ids) % 4 or len(deltas.ids) != len(deltas.logprobs):
        raise ProtocolError("delta columns have impossible lengths")
    rows = delta_rows(deltas)
    if int(rows["count"].sum(dtype=np.int64)) * 4 != len(deltas.ids):
        raise ProtocolError("delta rows count other tokens than the columns hold")
    if rows.size and int(rows["finish"].max()) >= len(FINISH_CODES):
        raise ProtocolError("unknown finish code in a delta row")


def delta_rows(deltas: Deltas) -> npt.NDArray[np.void]:
    """ROW_DTYPE[R], a view."""
    return np.frombuffer(deltas.rows, dtype=ROW_DTYPE)


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids as they travel: uint32 little-endian."""
    return np.asarray(ids, dtype="<u4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.uint32]:
    """uint32[T], a view. Raises ProtocolError when `data` is not whole numbers long."""
    if len(data) % 4:
        raise ProtocolError("token ids are not a multiple of 4 bytes")
    return np.frombuffer(data, dtype="<u4")
