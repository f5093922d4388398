"""What can happen to a ledger. Each decision ends in facts; `fold` applies them, a journal may keep them.

Folding the same facts in the same order rebuilds the same state. Facts that are not `durable` say only what a restart
would learn anew (signs of life, load, timers); a journal may leave them out.

Refuses to hold: behaviour. Read next: `fold`.
"""

from __future__ import annotations

from enum import IntFlag
from typing import ClassVar, Final, TypeAlias

import msgspec

from polyrl.sample import DiscardReason, Finish, Group, Pool, Purpose
from polyrl.wire import Next


class Effect(IntFlag):
    """What must be decided anew after a fact."""

    NONE = 0
    PLACE = 1
    """Work or room appeared."""
    PACK = 2
    """A waiting Next may have its answer."""
    FIT = 4
    """Which engines may serve which versions changed."""


class _Fact(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all facts; `at` is the ledger's clock in seconds."""

    effect: ClassVar[Effect] = Effect.NONE
    durable: ClassVar[bool] = True


# --- samples ----------------------------------------------------------------------------------------------------------


class GroupSubmitted(_Fact, frozen=True):
    """The trainer wants these n samples."""

    group: Group
    at: float
    effect: ClassVar[Effect] = Effect.PLACE | Effect.FIT


class Assigned(_Fact, frozen=True):
    """A waiting sample goes to an engine."""

    assignment: int
    sample: str
    engine: str
    kv: int
    at: float
    reading: int = 0
    """Tokens that it must read before the first new one."""


class PlacementHeld(_Fact, frozen=True):
    """A sample waits for the engine that holds its prefix, until `until` at most."""

    sample: str
    until: float
    durable: ClassVar[bool] = False


class PlacementPaused(_Fact, frozen=True):
    """There is room and work for it left, to be looked at in the next tick, which is due at once."""

    at: float
    durable: ClassVar[bool] = False


class BalancePaused(_Fact, frozen=True):
    """So much was looked at in search of better places that the next look waits until `until`."""

    at: float
    until: float
    durable: ClassVar[bool] = False


class TokensTaken(_Fact, frozen=True):
    """A Deltas of an engine; `rows`, `ids` and `logprobs` hold only what was accepted, in the wire's form."""

    engine: str
    seq: int
    version: int
    rows: bytes
    ids: bytes
    logprobs: bytes
    frame_bytes: int
    in_vain: int
    """Tokens refused because their assignment was over or their version wrong."""
    repeated: int
    """Tokens refused because they were here already."""
    at: float


class ReturnAsked(_Fact, frozen=True):
    """A healthy engine was asked to give an assignment back; its sample goes to `to`, which sets `kv` tokens aside."""

    assignment: int
    cause: str
    """One of `moves.CAUSES`."""
    to: str
    kv: int
    durable: ClassVar[bool] = False


class Moved(_Fact, frozen=True):
    """An assignment ends unfinished; its sample waits again with all its tokens."""

    assignment: int
    cause: str
    """One of `moves.CAUSES`."""
    at: float
    effect: ClassVar[Effect] = Effect.PLACE


class TurnEnded(_Fact, frozen=True):
    """The engine's part of a turn is over, and the trainer is asked for its verdict until `ask_due` at least."""

    sample: str
    finish: Finish
    ask_due: float
    at: float
    effect: ClassVar[Effect] = Effect.PLACE


class TurnAsked(_Fact, frozen=True):
    """The verdict was asked for again."""

    sample: str
    ask_due: float
    durable: ClassVar[bool] = False


class TurnExtended(_Fact, frozen=True):
    """An environment wrote `ids` (uint32); the sample waits for an engine again."""

    sample: str
    ids: bytes
    at: float
    effect: ClassVar[Effect] = Effect.PLACE | Effect.FIT


class SampleScored(_Fact, frozen=True):
    """The sample is finished and worth `reward`."""

    sample: str
    reward: float
    metrics: dict[str, float]
    at: float


class GroupCompleted(_Fact, frozen=True):
    """All samples are scored and the group passed the filter."""

    group: int
    at: float
    effect: ClassVar[Effect] = Effect.PACK


class GroupDiscarded(_Fact, frozen=True):
    """No sample of the group will be trained: `culprit` for `reason`, its siblings as groupIncomplete; without a
    culprit all for `reason`."""

    group: int
    culprit: str
    reason: DiscardReason
    detail: str
    notify: bool
    """The trainer did not ask for it and must hear of it."""
    at: float
    effect: ClassVar[Effect] = Effect.PLACE | Effect.PACK


# --- batches and the trainer ------------------------------------------------------------------------------------------


class NextAsked(_Fact, frozen=True):
    """A Next waits for its answer."""

    request: Next
    at: float
    effect: ClassVar[Effect] = Effect.PACK | Effect.PLACE


class NextClosed(_Fact, frozen=True):
    """A Next was answered with nothing: late, empty or refused."""

    request: int


class BatchPacked(_Fact, frozen=True):
    """These complete groups answer `request`."""

    batch: int
    request: Next
    groups: list[int]
    last: bool
    at: float


class BatchAcknowledged(_Fact, frozen=True):
    """The batch is part of the trainer's state; its samples have ended well."""

    batch: int
    at: float
    effect: ClassVar[Effect] = Effect.PLACE


class BatchReturned(_Fact, frozen=True):
    """The trainer that got the batch is gone without having acknowledged it: its groups can be packed again."""

    batch: int
    at: float
    effect: ClassVar[Effect] = Effect.PACK


class StepEnded(_Fact, frozen=True):
    """The trainer wants nothing more of this step and purpose."""

    step: int
    purpose: Purpose
    at: float
    effect: ClassVar[Effect] = Effect.PACK


class VersionPublished(_Fact, frozen=True):
    """A newer weight version can be pulled."""

    version: int
    endpoint: str
    public_key: str
    manifest_hash: bytes
    at: float
    effect: ClassVar[Effect] = Effect.FIT | Effect.PLACE


class WindowSet(_Fact, frozen=True):
    """Reserved engines may generate, or no longer; see `reserved.slowest_pace`."""

    open: bool
    at: float
    token_s: float = 0.0
    read_s: float = 0.0
    effect: ClassVar[Effect] = Effect.FIT | Effect.PLACE


class Reported(_Fact, frozen=True):
    """What the trainer wants seen."""

    phase: str
    step: int
    values: dict[str, float]
    at: float


class RequestDone(_Fact, frozen=True):
    """A request whose repetition would not be harmless took effect."""

    request: int
    digest: bytes
    """Of the request; for a Next its answer follows, in the wire's form."""


class TrainerHeard(_Fact, frozen=True):
    """A sign of life of the trainer."""

    at: float
    durable: ClassVar[bool] = False


class TrainerGreeted(_Fact, frozen=True):
    """A trainer's process came, or came back."""

    trainer: str
    at: float


class NumbersTaken(_Fact, frozen=True):
    """Peers know of numbers that this ledger does not: its journal is younger than they are. None of them is used."""

    group: int
    batch: int
    assignment: int
    """Each: all numbers below it are taken."""
    at: float


class RunFinished(_Fact, frozen=True):
    """The trainer's last words."""

    ok: bool
    message: str
    at: float
    effect: ClassVar[Effect] = Effect.PACK


# --- engines ----------------------------------------------------------------------------------------------------------


class EngineGreeted(_Fact, frozen=True):
    """An engine joined, or greeted again within its lease."""

    engine: str
    pool: Pool
    max_running: int
    kv_tokens: int
    max_context: int
    version: int
    at: float
    effect: ClassVar[Effect] = Effect.FIT | Effect.PLACE


class EngineHeard(_Fact, frozen=True):
    """A sign of life."""

    engine: str
    at: float
    durable: ClassVar[bool] = False


class EngineLoad(_Fact, frozen=True):
    """What an engine says of its load."""

    engine: str
    running: int
    queued: int
    kv_free_tokens: int
    durable: ClassVar[bool] = False


class EngineServing(_Fact, frozen=True):
    """An engine serves `version`, verified; -1: nothing."""

    engine: str
    version: int
    at: float
    effect: ClassVar[Effect] = Effect.FIT | Effect.PLACE


class WeightsAwaited(_Fact, frozen=True):
    """An engine could not load; the version is announced to it again at `retry_at` (inf: it was)."""

    engine: str
    retry_at: float
    durable: ClassVar[bool] = False


STRAGGLER: Final = "straggler"
"""Cause of a strike after which tokens alone prove nothing."""


class EngineStruck(_Fact, frozen=True):
    """An engine failed and gets no work before `trusted_at`."""

    engine: str
    trusted_at: float
    cause: str
    at: float


class EngineTrusted(_Fact, frozen=True):
    """A straggler gets work like any other again."""

    engine: str
    cause: str
    """`proven` (it is slow no longer) or `needed` (too few others are left)."""
    at: float
    effect: ClassVar[Effect] = Effect.FIT | Effect.PLACE


class EngineDraining(_Fact, frozen=True):
    """An engine gets nothing new, and at `drain_at` what it still runs is moved."""

    engine: str
    drain_at: float
    reason: str
    at: float
    effect: ClassVar[Effect] = Effect.FIT | Effect.PLACE


class DrainExpired(_Fact, frozen=True):
    """The drain deadline has passed and nothing is left there."""

    engine: str


class EngineGone(_Fact, frozen=True):
    """An engine's lease is over; it runs nothing that counts any more."""

    engine: str
    cause: str
    """`bye` or `silent`."""
    at: float
    effect: ClassVar[Effect] = Effect.FIT | Effect.PLACE


class GapSeen(_Fact, frozen=True):
    """Tokens of an assignment are missing; they were asked for."""

    assignment: int
    at: float
    durable: ClassVar[bool] = False


# --- time and noise ---------------------------------------------------------------------------------------------------


class LeasesRenewed(_Fact, frozen=True):
    """We ourselves were away; nobody's silence before `at` counts, which may be in the future."""

    at: float
    effect: ClassVar[Effect] = Effect.PLACE
    durable: ClassVar[bool] = False


class Ticked(_Fact, frozen=True):
    """Deadlines were looked through; the next one is at `due`."""

    due: float
    effect: ClassVar[Effect] = Effect.PLACE
    durable: ClassVar[bool] = False


class Ignored(_Fact, frozen=True):
    """A message without effect, counted by kind."""

    kind: str
    durable: ClassVar[bool] = False


Fact: TypeAlias = (
    GroupSubmitted
    | Assigned
    | PlacementHeld
    | PlacementPaused
    | BalancePaused
    | TokensTaken
    | ReturnAsked
    | Moved
    | TurnEnded
    | TurnAsked
    | TurnExtended
    | SampleScored
    | GroupCompleted
    | GroupDiscarded
    | NextAsked
    | NextClosed
    | BatchPacked
    | BatchAcknowledged
    | BatchReturned
    | StepEnded
    | VersionPublished
    | WindowSet
    | Reported
    | RequestDone
    | TrainerHeard
    | TrainerGreeted
    | NumbersTaken
    | RunFinished
    | EngineGreeted
    | EngineHeard
    | EngineLoad
    | EngineServing
    | WeightsAwaited
    | EngineStruck
    | EngineTrusted
    | EngineDraining
    | DrainExpired
    | EngineGone
    | GapSeen
    | LeasesRenewed
    | Ticked
    | Ignored
)
