"""The messages between PolyRL's processes, and how they look in bytes.

    agent      agent <-> manager, and agent <-> publisher of weights
    trainer    trainer <-> manager
    frames     messages to bytes and back: `encode`, `decode_*`; the columns of token rows

One frame is one version byte and one msgpack array whose first item is the message's tag; no pickle, no field names.
Every message is idempotent or carries what makes it so: `request` (trainer), `assignment` and `offset` (tokens),
`version` (weights), `run_epoch` (everything). Fields are only ever appended with a default; a changed meaning takes a
new tag. `decode_*` raise ProtocolError and nothing else, whatever the bytes; callers count and drop. Durations are
seconds from receipt, never wall-clock times: clocks differ.

Other packages import everything from here. Read next: `agent`.
"""

from __future__ import annotations

from polyrl.wire.agent import (
    FINISH_CODES as FINISH_CODES,
    ROW_DTYPE as ROW_DTYPE,
    SUPERSEDED as SUPERSEDED,
    Announce as Announce,
    Assign as Assign,
    Cancel as Cancel,
    ChunkReply as ChunkReply,
    Deltas as Deltas,
    Deregister as Deregister,
    EngineCapacity as EngineCapacity,
    Fenced as Fenced,
    FromAgent as FromAgent,
    FromPuller as FromPuller,
    GetChunk as GetChunk,
    GetManifest as GetManifest,
    HandBack as HandBack,
    HandBackReason as HandBackReason,
    Heartbeat as Heartbeat,
    HeldAssignment as HeldAssignment,
    Hello as Hello,
    Leaving as Leaving,
    ManifestReply as ManifestReply,
    Recall as Recall,
    Resend as Resend,
    StartDrain as StartDrain,
    ToAgent as ToAgent,
    TokensKept as TokensKept,
    ToPuller as ToPuller,
    WeightsFailed as WeightsFailed,
    WeightsLoaded as WeightsLoaded,
    Welcome as Welcome,
)
from polyrl.wire.frames import (
    MAX_FRAME_BYTES as MAX_FRAME_BYTES,
    WIRE_VERSION as WIRE_VERSION,
    RowColumns as RowColumns,
    check_deltas as check_deltas,
    decode_from_agent as decode_from_agent,
    decode_from_puller as decode_from_puller,
    decode_from_trainer as decode_from_trainer,
    decode_to_agent as decode_to_agent,
    decode_to_puller as decode_to_puller,
    decode_to_trainer as decode_to_trainer,
    encode as encode,
    pack_ids as pack_ids,
    pack_rows as pack_rows,
    row_columns as row_columns,
    unpack_ids as unpack_ids,
)
from polyrl.wire.trainer import (
    Accepted as Accepted,
    Acknowledge as Acknowledge,
    Batch as Batch,
    BatchRequest as BatchRequest,
    Declined as Declined,
    EndStep as EndStep,
    Extend as Extend,
    FinishRun as FinishRun,
    FromTrainer as FromTrainer,
    GroupDropped as GroupDropped,
    HeldGroup as HeldGroup,
    Late as Late,
    PublishVersion as PublishVersion,
    Reject as Reject,
    ReservedWindow as ReservedWindow,
    Score as Score,
    Submit as Submit,
    ToTrainer as ToTrainer,
    TrainerHeartbeat as TrainerHeartbeat,
    TrainerHello as TrainerHello,
    TrainerReport as TrainerReport,
    TrainerWelcome as TrainerWelcome,
    TurnDone as TurnDone,
)
