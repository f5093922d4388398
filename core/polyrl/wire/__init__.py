"""The messages between PolyRL's processes, and how they look in bytes.

    agent      agent <-> manager, and agent <-> publisher of weights
    trainer    trainer <-> manager
    texts      how a trainer makes whole turns and batches of messages that carry only what is new

Messages to bytes and back, and the checks that bytes must pass, are here: `encode`, `decode_*`, the columns of rows.
One frame is one version byte and one msgpack array whose first item is the message's tag; no pickle, no field names.
Every message is idempotent or carries what makes it so: `request` (trainer), `assignment` and `offset` (tokens),
`version` (weights), `run_epoch` (everything). Fields are only ever appended with a default; a changed meaning takes a
new tag. `decode_*` raise ProtocolError and nothing else, whatever the bytes; callers count and drop. Durations are
seconds from receipt, never wall-clock times: clocks differ.

Other packages import everything from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from polyrl.errors import ProtocolError
from polyrl.wire.agent import (
    FINISH_CODES as FINISH_CODES,
    MAX_REASON as MAX_REASON,
    ROW_DTYPE as ROW_DTYPE,
    SUPERSEDED as SUPERSEDED,
    TOKEN_BYTES as TOKEN_BYTES,
    Announce as Announce,
    Asleep as Asleep,
    Assign as Assign,
    Cancel as Cancel,
    Deltas as Deltas,
    Deregister as Deregister,
    EngineCapacity as EngineCapacity,
    Fenced as Fenced,
    FromAgent as FromAgent,
    FromPeer as FromPeer,
    FromPuller as FromPuller,
    GetChunk as GetChunk,
    GetHeld as GetHeld,
    GetLent as GetLent,
    GetManifest as GetManifest,
    GoToSleep as GoToSleep,
    HandBack as HandBack,
    HandBackReason as HandBackReason,
    Heartbeat as Heartbeat,
    HeldAssignment as HeldAssignment,
    Hello as Hello,
    Leaving as Leaving,
    Message,
    Peer as Peer,
    Peers as Peers,
    PrefixUnknown as PrefixUnknown,
    Recall as Recall,
    Resend as Resend,
    ServeOffer as ServeOffer,
    StartDrain as StartDrain,
    ToAgent as ToAgent,
    TokensKept as TokensKept,
    WakeUp as WakeUp,
    WeightsFailed as WeightsFailed,
    WeightsLoaded as WeightsLoaded,
    Welcome as Welcome,
    checksum_of as checksum_of,
)
from polyrl.wire.texts import SampleTexts as SampleTexts, part_of as part_of, whole_of as whole_of
from polyrl.wire.trainer import (
    MAX_METRICS_BYTES as MAX_METRICS_BYTES,
    NUMBER_BYTES as NUMBER_BYTES,
    Accepted as Accepted,
    Acknowledge as Acknowledge,
    Batch as Batch,
    BatchRequest as BatchRequest,
    Covered as Covered,
    Declined as Declined,
    EndStep as EndStep,
    EngineMeasure as EngineMeasure,
    Extend as Extend,
    Fetch as Fetch,
    Fetched as Fetched,
    FetchedText as FetchedText,
    FetchReport as FetchReport,
    FinishRun as FinishRun,
    FromTrainer as FromTrainer,
    FromTrainerPod as FromTrainerPod,
    GroupDropped as GroupDropped,
    HeldGroup as HeldGroup,
    Late as Late,
    NoticesTaken as NoticesTaken,
    PublishVersion as PublishVersion,
    Reject as Reject,
    Score as Score,
    Submit as Submit,
    ToTrainer as ToTrainer,
    TrainerHeartbeat as TrainerHeartbeat,
    TrainerHello as TrainerHello,
    TrainerReport as TrainerReport,
    TrainerWelcome as TrainerWelcome,
    TurnDone as TurnDone,
    TurnsAwaited as TurnsAwaited,
    VersionServed as VersionServed,
    Withdraw as Withdraw,
    engine_shares as engine_shares,
    excess_of_metrics as excess_of_metrics,
)

WIRE_VERSION: Final = 1
"""First byte of every frame; a peer of another version is refused at its first frame."""

MAX_FRAME_BYTES: Final = 64 << 20
"""Largest frame that is decoded; anything above is an attack or a bug. No message outgrows it with the work: texts go
one sample per frame, and a sample that would not fit is refused when it is submitted or extended."""

MAX_SAMPLE_TOKENS: Final = MAX_FRAME_BYTES // 16
"""Prompt and response of one sample, 4 million tokens: each takes 9 bytes in the largest frame that carries them, and
the rest is for where they came from."""

MAX_BATCH_SAMPLES: Final = MAX_FRAME_BYTES // (MAX_METRICS_BYTES + 256)
"""Samples of one Batch, some 8,000: each carries its metrics and less than 256 bytes beside."""

AGENT_FRAME_BYTES: Final = 4 << 20
"""Largest frame of an agent: tokens go out in frames of half of it, and the greeting of the largest engine, which holds
65,536 sequences, takes 1.2 MB. None takes the manager more than 0.1 s."""

MAX_ROWS: Final = 16_384
"""Rows of one frame of tokens: each is decided apart where one is not as expected, in some 5 µs."""

SUBMIT_BYTES: Final = 8 << 20
"""Prompts that one Submit carries at most, unless a single one is longer: what a manager decodes at once."""

SUBMIT_SAMPLES: Final = 1024
"""Samples that one Submit asks for at most, unless a single group is larger: a manager of 2,000 engines takes so many
in 50 to 80 ms, most of them for the placing that follows; it took 16,384 in 190 ms, and heard nobody meanwhile."""


_encoder = msgspec.msgpack.Encoder()
_VERSION_BYTE: Final = bytes([WIRE_VERSION])


def encode(message: Message) -> bytes:
    """One frame."""
    return _VERSION_BYTE + _encoder.encode(message)


Frame: TypeAlias = bytes | memoryview


def _decoder(messages: Any, limit: int = MAX_FRAME_BYTES) -> Callable[[Frame], Any]:
    """A function from one frame to one of `messages`; it raises ProtocolError and nothing else."""
    decoder = msgspec.msgpack.Decoder(messages)

    def decode(frame: Frame) -> Any:
        if len(frame) > limit:
            raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit of {limit}")
        if len(frame) < 2 or frame[0] != WIRE_VERSION:
            raise ProtocolError(f"not a frame of wire version {WIRE_VERSION}")
        try:
            return decoder.decode(memoryview(frame)[1:])
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"undecodable frame: {error}") from error

    return decode


def other_version(frame: Frame) -> str:
    """What is to be said to the sender of a frame of another version; empty where it is of this one."""
    if not frame or frame[0] == WIRE_VERSION:
        return ""
    return f"it speaks wire version {frame[0]}, the manager {WIRE_VERSION}; all parts of a run are of one version"


decode_to_agent: Final[Callable[[Frame], ToAgent]] = _decoder(ToAgent)
decode_from_trainer: Final[Callable[[Frame], FromTrainerPod]] = _decoder(FromTrainerPod)
decode_to_trainer: Final[Callable[[Frame], ToTrainer]] = _decoder(ToTrainer)
decode_from_puller: Final[Callable[[Frame], FromPuller]] = _decoder(FromPuller)
decode_from_peer: Final[Callable[[Frame], FromPeer]] = _decoder(FromPeer)
_decode_from_agent: Final[Callable[[Frame], FromAgent]] = _decoder(FromAgent, AGENT_FRAME_BYTES)


def decode_from_agent(frame: Frame) -> FromAgent:
    """Raises ProtocolError, also for Deltas whose columns do not fit each other."""
    message = _decode_from_agent(frame)
    if isinstance(message, Deltas):
        check_deltas(message)
    return message


def check_deltas(deltas: Deltas) -> None:
    """Column lengths agree and finish codes exist. Raises ProtocolError."""
    problem = _problem_of(deltas.rows, len(deltas.ids), len(deltas.logprobs))
    if problem:
        raise ProtocolError(problem)


@lru_cache(maxsize=1)
def _problem_of(rows: bytes, id_bytes: int, logprob_bytes: int) -> str:
    """What is wrong with a frame's columns, if anything; asked where it is decoded, and again where it is decided."""
    if len(rows) > MAX_ROWS * ROW_DTYPE.itemsize:
        return f"a frame has more than {MAX_ROWS} delta rows"
    if len(rows) % ROW_DTYPE.itemsize or id_bytes % 4 or id_bytes != logprob_bytes:
        return "delta columns have impossible lengths"
    _, _, counts, finishes = row_columns(rows)
    if sum(counts) * 4 != id_bytes:
        return "delta rows count other tokens than the columns hold"
    if max(finishes, default=0) >= len(FINISH_CODES):
        return "unknown finish code in a delta row"
    return ""


RowColumns: TypeAlias = tuple[list[int], list[int], list[int], list[int]]


@lru_cache(maxsize=1)
def row_columns(rows: bytes) -> RowColumns:
    """assignment[R], offset[R], count[R], finish[R] of ROW_DTYPE[R]: plain numbers, to be read only.

    The newest answer is remembered: whoever looks at a frame on its way through a process shares one decoding of it.
    """
    table = np.frombuffer(rows, dtype=ROW_DTYPE)
    return table["assignment"].tolist(), table["offset"].tolist(), table["count"].tolist(), table["finish"].tolist()


def pack_rows(rows: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Inverse of `row_columns`, from (assignment, offset, count, finish) per row."""
    return np.array(rows, dtype=ROW_DTYPE).tobytes()


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids as they travel: uint32 little-endian."""
    return np.asarray(ids, dtype="<u4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.uint32]:
    """uint32[T], a view. Raises ProtocolError when `data` is not whole numbers long."""
    if len(data) % 4:
        raise ProtocolError("token ids are not a multiple of 4 bytes")
    return np.frombuffer(data, dtype="<u4")
