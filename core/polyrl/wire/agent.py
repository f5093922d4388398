"""Messages between agents and the manager, and between agents and a publisher of weights."""

from __future__ import annotations

import zlib
from enum import StrEnum
from math import inf
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from polyrl.sample import Pool, SamplingParams
from polyrl.weights import WeightsRef
from polyrl.weights.engine_sums import EngineSum


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field=None):
    """Base of all messages: a frozen msgpack array; the subclass's tag is its first item."""


MAX_REASON: Final = 1024
"""Characters of a reason or a detail: it is journaled, listed, logged. What is longer is cut when the message is made,
by its sender and by its receiver: a Leaving counts however much it explains."""


def shorten(message: Message, field: str) -> None:
    text = getattr(message, field)
    if len(text) > MAX_REASON:
        msgspec.structs.force_setattr(message, field, text[:MAX_REASON])


Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]
"""Name of an engine or a sample; with a longer one a frame is refused."""

Versions: TypeAlias = Annotated[tuple[int, ...], msgspec.Meta(max_length=256)]
"""Four times as many as the largest allowed staleness lets an engine hold tokens of."""

Liars: TypeAlias = Annotated[tuple[Name, ...], msgspec.Meta(max_length=1024)]

Receipts: TypeAlias = Annotated[dict[int, bytes], msgspec.Meta(max_length=257)]
"""`weights.receipt_of` by version: of those, and of the one that it serves."""


def checksum_of(ids: bytes | bytearray | memoryview) -> int:
    """CRC-32 of packed ids: tells two texts of one sample apart, not an attacker from a friend."""
    return zlib.crc32(ids)


class HeldAssignment(msgspec.Struct, frozen=True, array_like=True):
    """An assignment the agent still generates or still holds tokens of, sent when it greets again."""

    assignment: int
    sample: Name
    attempt: int
    length: int
    """Response position after the last token that the agent holds."""


class EngineCapacity(msgspec.Struct, frozen=True, array_like=True):
    """How much an engine can do at once."""

    max_running: int
    """Sequences."""
    kv_tokens: int
    """KV-cache room, in tokens."""
    max_context: int
    """Longest prompt + response, in tokens."""


class Hello(Message, frozen=True, tag="hello"):
    """First message of an agent, repeated after each reconnect; the manager answers Welcome or Fenced."""

    run_epoch: int
    engine: Name
    """Unique for the life of this engine process (a pod UID, or a fresh random name on a laptop); never reused."""
    pool: Pool
    max_running: int
    kv_tokens: int
    max_context: int
    weight_version: int
    """Verified version that the engine serves; -1 for none."""
    held: tuple[HeldAssignment, ...] = ()
    versions: Versions = ()
    """Verified versions that made tokens of `held`: what it served while nobody listened."""
    leaving_s: float | None = None
    """Seconds until it ends, if it was given notice: a Leaving may be lost with its connection."""
    leaving_reason: str = ""
    seq: int = -1
    """Number of the newest Deltas before, 0 for none: so the loss of the first one on this connection shows. -1: an
    agent of an earlier version does not say."""
    receipts: Receipts = {}
    """Receipts of all versions that it names."""
    peer_key: bytes = b""
    """Public half that other agents know it by (see `sealing.PeerKeys`); empty: it gives and takes no chunks."""
    peer_port: int = 0
    """Where it gives them, at the address from which it dials us; 0: nowhere."""
    sleeps: bool = False
    """It takes GoToSleep and WakeUp; one that does not is never asked."""
    asleep: bool = False
    """It holds no memory of its device: it sleeps, or was not started yet, and goes on by WakeUp."""
    sum: EngineSum | None = None
    """Sum of the weights of `weight_version`, as in WeightsLoaded."""

    def __post_init__(self) -> None:
        shorten(self, "leaving_reason")

    @property
    def capacity(self) -> EngineCapacity:
        return EngineCapacity(self.max_running, self.kv_tokens, max_context=self.max_context)


ROW_DTYPE: Final = np.dtype([("assignment", "<u4"), ("offset", "<u4"), ("count", "<u2"), ("finish", "u1")])
"""One row of Deltas, 11 bytes. `offset`: response position of the row's first token; `finish` indexes FINISH_CODES."""

TOKEN_BYTES: Final = 8
"""What a token takes in Deltas beside its row: uint32 id and float32 logprob."""

FINISH_CODES: Final = (None, "stop", "length")
"""Row finish codes: still running, ended by a stop token, ended by its token budget."""


class Deltas(Message, frozen=True, tag="tok"):
    """New tokens of all running assignments since the last one, in columns; all made by one weight version."""

    seq: int
    """Counts up by 1; answered by TokensKept. A number left out is a frame that was lost on a living connection."""
    version: int
    rows: bytes
    """ROW_DTYPE[R]"""
    ids: bytes
    """uint32[sum of rows.count]"""
    logprobs: bytes
    """float32[sum of rows.count]"""


class Heartbeat(Message, frozen=True, tag="beat"):
    """Sign of life and load, each heartbeat interval, also while tokens flow."""

    running: int
    queued: int
    kv_free_tokens: int
    newest: int = -1
    """The newest assignment that has come, 0 for none: what it says of KV room knows of none after it. -1: unsaid."""


class WeightsLoaded(Message, frozen=True, tag="serving"):
    """The engine has loaded `version` and every checksum matched: samples may be placed on it."""

    version: int
    pull_seconds: float
    load_seconds: float
    """Reading and taking the weights; with the two below, how long the update paused the engine."""
    bytes_pulled: int
    receipt: bytes = b""
    """`weights.receipt_of` what was pulled."""
    bytes_from_peers: int = 0
    """The part of `bytes_pulled` that other agents gave."""
    liars: Liars = ()
    """Engines whose agents gave it a false chunk since it said so last: the chunk was dropped, and they are asked no
    more."""
    wait_seconds: float = 0.0
    """Until nothing was generated any more."""
    verify_seconds: float = 0.0
    """Whether the weights fit the model, and what the engine then adds them up to."""
    sum: EngineSum | None = None
    """None: this engine says nothing, or its agent is of an earlier version."""
    step_seconds: float = 0.0
    """Per decoding step of one sequence, as the agent has tried its engine before the first sample; 0: it has not."""
    read_seconds: float = 0.0
    """The same, per token of a prompt."""
    tried_seconds_ago: float = inf
    """When that was; an engine without work is tried anew, and this message sent again."""


class WeightsFailed(Message, frozen=True, tag="wfail"):
    """The engine could not get or load `version`; it still serves `serving` (-1: nothing)."""

    version: int
    serving: int
    reason: str

    def __post_init__(self) -> None:
        shorten(self, "reason")


class Asleep(Message, frozen=True, tag="asleep"):
    """Answer to GoToSleep: the device has its memory, and what ran was handed back before. It pulls weights meanwhile,
    and serves again after WakeUp, which is answered by WeightsLoaded."""

    seconds: float
    """Seconds that falling asleep took."""
    order: int = 0
    """`GoToSleep.order`; 0: of an agent that knows of no numbers."""


class HandBackReason(StrEnum):
    """Why an engine gives an assignment back."""

    DRAINING = "draining"
    """The engine drains."""
    ENGINE_ERROR = "engineError"
    """The engine failed while generating it."""
    REJECTED = "rejected"
    """The only one that speaks of the sample itself: too long, malformed. The others are the engine's own affairs."""
    VERSION_CHANGED = "versionChanged"
    """The engine loads, or has loaded, a version that it may not use."""
    RECALLED = "asked"
    """The manager sent a Recall."""


class HandBack(Message, frozen=True, tag="returned"):
    """The engine gives an assignment back unfinished, tokens so far sent before."""

    assignment: int
    reason: str
    """A HandBackReason; another one counts as ENGINE_ERROR."""
    detail: str = ""

    def __post_init__(self) -> None:
        shorten(self, "reason")
        shorten(self, "detail")


class PrefixUnknown(Message, frozen=True, tag="noprefix"):
    """The agent does not have the text that an Assign begins with; the same Assign follows with all of it."""

    assignment: int


class Leaving(Message, frozen=True, tag="leaving"):
    """The agent ends within `deadline_s` (SIGTERM, metadata notice); the manager drains it."""

    deadline_s: float
    reason: str

    def __post_init__(self) -> None:
        shorten(self, "reason")


class Deregister(Message, frozen=True, tag="bye"):
    """Last message; nothing of this engine runs any more."""

    reason: str

    def __post_init__(self) -> None:
        shorten(self, "reason")


class Welcome(Message, frozen=True, tag="welcome"):
    """The agent is in; its lease runs from its last message. What it holds was answered before, by Resend or Cancel."""

    run_epoch: int
    lease_s: float
    beat_s: float
    delta_s: float
    """How long the agent gathers tokens before it sends a Deltas."""


class Assign(Message, frozen=True, tag="assign"):
    """Generate on after the prompt and all so far; the next token has response position `offset`.

    A sample is a session: the engine that ended its last turn still has that turn's text, so only what came since is
    sent, and `base` tells how much is left out. An agent that has no such text any more answers PrefixUnknown."""

    assignment: int
    """Names (sample, attempt) towards this engine; never reused within an epoch."""
    sample: str
    attempt: int
    input_ids: bytes
    """uint32: prompt and response so far without their first `base` tokens."""
    offset: int
    max_new_tokens: int
    """What is left of the sample's budget, or of the engine's context after `input_ids` if that is less."""
    sampling: SamplingParams
    min_version: int
    max_version: int
    base: int = 0
    """Tokens that the agent has from the last turn it generated of this sample."""
    base_check: int = 0
    """CRC-32 of those, as uint32; another text of the same length must not be taken for it."""
    turn_start: int = 0
    """Response position where the turn begins: stop strings are looked for from there on."""


class Cancel(Message, frozen=True, tag="cancel"):
    """Stop and forget this assignment; no answer is expected, later rows of it are ignored."""

    assignment: int


class Recall(Message, frozen=True, tag="return"):
    """Stop this assignment and give it back: first what is not sent of its tokens, then HandBack with RECALLED. The
    sample goes on elsewhere, and no token of it is generated twice."""

    assignment: int


class TokensKept(Message, frozen=True, tag="kept"):
    """Deltas up to `seq` are safe; the agent may forget them."""

    seq: int


class Resend(Message, frozen=True, tag="resend"):
    """A gap: send the assignment's tokens again from response position `offset`."""

    assignment: int
    offset: int


class Announce(Message, frozen=True, tag="announce"):
    """A weight version exists; pull it from `endpoint` (CURVE server key `public_key`, Z85) and load it."""

    version: int
    endpoint: str
    public_key: str
    manifest_hash: bytes
    others: tuple[str, ...] = ()
    """Endpoints of the learner's further machines, each of which has a share of it."""

    @classmethod
    def of(cls, weights: WeightsRef) -> Announce:
        return cls(weights.version, weights.endpoint, weights.public_key, weights.manifest_hash, weights.others)

    @property
    def weights(self) -> WeightsRef:
        return WeightsRef(
            self.version,
            self.endpoint,
            public_key=self.public_key,
            manifest_hash=self.manifest_hash,
            others=self.others,
        )


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """An agent of the run, to another one."""

    engine: Name
    public_key: bytes
    endpoint: str = ""
    """Where it gives chunks; empty: nowhere."""


class Peers(Message, frozen=True, tag="peers"):
    """Who else of the run gives and takes chunks of weights: all of them, or what has changed since."""

    added: tuple[Peer, ...]
    gone: tuple[str, ...] = ()
    """Engines that nobody lets in any more."""
    whole: bool = False
    """`added` is all: who is not in it is gone."""


class StartDrain(Message, frozen=True, tag="drain"):
    """Finish or hand back everything before `deadline_s`, take nothing new, then Deregister."""

    deadline_s: float
    reason: str


class GoToSleep(Message, frozen=True, tag="sleep"):
    """The learner needs the device: hand everything back, and give its memory back; answered by Asleep."""

    deadline_s: float
    """After which the learner waits no longer. An engine that cannot do it by then is ended, which frees the memory."""
    order: int = 0
    """Numbers rise: an order that was given twice is answered twice, and the second answer is none to a later order."""


class WakeUp(Message, frozen=True, tag="wake"):
    """The learner waits, and the device is free: serve the newest weights that are here. One that does so already says
    again what it serves. A Welcome takes the order back unless it comes again after it."""


SUPERSEDED: Final = "another trainer has taken this one's place"
"""Reason of a Fenced that is for good: its receiver must touch nothing any more."""


class Fenced(Message, frozen=True, tag="fenced"):
    """The sender belongs to another epoch, or says what cannot be; it must stop what it runs and greet anew or end.
    Its bytes are the same in all versions, so that it can be sent to a peer of another one."""

    reason: str
    lease_over: bool = False
    """It was silent for too long, and no more: it goes on, and greets anew with what it holds, which may be taken."""


FromAgent: TypeAlias = (
    Hello
    | Deltas
    | Heartbeat
    | WeightsLoaded
    | WeightsFailed
    | Asleep
    | HandBack
    | PrefixUnknown
    | Leaving
    | Deregister
)
ToAgent: TypeAlias = (
    Welcome
    | Assign
    | Cancel
    | Recall
    | TokensKept
    | Resend
    | Announce
    | Peers
    | GoToSleep
    | WakeUp
    | StartDrain
    | Fenced
)


class GetManifest(Message, frozen=True, tag="getm"):
    """Ask for a version's manifest: msgpack of weights.VersionManifest."""

    version: int


class GetChunk(Message, frozen=True, tag="getc"):
    """Ask for one chunk by its content hash."""

    version: int
    hash: bytes


class GetLent(Message, frozen=True, tag="getl"):
    """Ask for one chunk, or for where it may be read (`weights.lending`). `returned`: tickets of what was read."""

    version: int
    hash: bytes
    returned: tuple[int, ...] = ()


FromPuller: TypeAlias = GetManifest | GetChunk | GetLent
"""Each is answered by bytes (see `wire.serving`)."""


class GetHeld(Message, frozen=True, tag="geth"):
    """Ask an agent which chunks of a version it can give: a bit for each chunk of the manifest in its order, then a bit
    for each that it awaits from the publisher."""

    manifest_hash: bytes


class ServeOffer(Message, frozen=True, tag="offer"):
    """First and only request of an agent that cannot be dialled: on this connection it is asked from here on, by whom
    it has dialled."""


FromPeer: TypeAlias = GetManifest | GetChunk | GetHeld | ServeOffer
