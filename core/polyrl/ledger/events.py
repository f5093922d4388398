"""What can happen to a ledger. Each decision ends in events; `fold` applies them, a journal may keep them.

Folding the same events in the same order rebuilds the same state. Events that are not `durable` say only what a restart
would learn anew (signs of life, load, timers); a journal may leave them out.

Refuses to hold: behaviour. Read next: `fold`.
"""

from __future__ import annotations

from enum import IntFlag
from typing import ClassVar, Final, TypeAlias

import msgspec

from polyrl.sample import DiscardReason, Finish, Group, Pool, Purpose
from polyrl.wire import BatchRequest


class FollowUp(IntFlag):
    """What must be decided anew after an event."""

    NONE = 0
    PLACE = 1
    """Work or room appeared."""
    PACK = 2
    """A waiting BatchRequest may have its answer."""
    FIT = 4
    """Which engines may serve which versions changed."""


class _Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all events; `at` is the ledger's clock in seconds."""

    follow_up: ClassVar[FollowUp] = FollowUp.NONE
    durable: ClassVar[bool] = True


# --- samples ----------------------------------------------------------------------------------------------------------


class GroupSubmitted(_Event, frozen=True):
    """The trainer wants these n samples."""

    group: Group
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE | FollowUp.FIT


class Assigned(_Event, frozen=True):
    """A waiting sample goes to an engine."""

    assignment: int
    sample: str
    engine: str
    kv: int
    at: float
    reading: int = 0
    """Tokens that it must read before the first new one."""


class PlacementHeld(_Event, frozen=True):
    """A sample waits for the engine that holds its prefix, until `until` at most."""

    sample: str
    until: float
    durable: ClassVar[bool] = False


class PlacementPaused(_Event, frozen=True):
    """There is room and work for it left, to be looked at in the next tick, which is due at once."""

    at: float
    durable: ClassVar[bool] = False


class BalancePaused(_Event, frozen=True):
    """So much was looked at in search of better places that the next look waits until `until`."""

    at: float
    until: float
    durable: ClassVar[bool] = False


class TokensTaken(_Event, frozen=True):
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


class RecallSent(_Event, frozen=True):
    """A healthy engine was asked to give an assignment back; its sample goes to `to`, which sets `kv` tokens aside."""

    assignment: int
    cause: str
    """One of `moves.CAUSES`."""
    to: str
    kv: int
    durable: ClassVar[bool] = False


class Moved(_Event, frozen=True):
    """An assignment ends unfinished; its sample waits again with all its tokens."""

    assignment: int
    cause: str
    """One of `moves.CAUSES`."""
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class TurnEnded(_Event, frozen=True):
    """The engine's part of a turn is over, and the trainer is asked for its verdict until `ask_due` at least."""

    sample: str
    finish: Finish
    ask_due: float
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class VerdictRequested(_Event, frozen=True):
    """The verdict was asked for again."""

    sample: str
    ask_due: float
    durable: ClassVar[bool] = False


class TurnExtended(_Event, frozen=True):
    """An environment wrote `ids` (uint32); the sample waits for an engine again."""

    sample: str
    ids: bytes
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE | FollowUp.FIT


class SampleScored(_Event, frozen=True):
    """The sample is finished and worth `reward`."""

    sample: str
    reward: float
    metrics: dict[str, float]
    at: float


class GroupCompleted(_Event, frozen=True):
    """All samples are scored and the group passed the filter."""

    group: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


class GroupDiscarded(_Event, frozen=True):
    """No sample of the group will be trained: `culprit` for `reason`, its siblings as groupIncomplete; without a
    culprit all for `reason`."""

    group: int
    culprit: str
    reason: DiscardReason
    detail: str
    notify: bool
    """The trainer did not ask for it and must hear of it."""
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE | FollowUp.PACK


# --- batches and the trainer ------------------------------------------------------------------------------------------


class BatchRequested(_Event, frozen=True):
    """A BatchRequest waits for its answer."""

    request: BatchRequest
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK | FollowUp.PLACE


class BatchRequestClosed(_Event, frozen=True):
    """A BatchRequest was answered with nothing: late, empty or refused."""

    request: int


class BatchPacked(_Event, frozen=True):
    """These complete groups answer `request`."""

    batch: int
    request: BatchRequest
    groups: list[int]
    last: bool
    at: float


class BatchAcknowledged(_Event, frozen=True):
    """The batch is part of the trainer's state; its samples have ended well."""

    batch: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class BatchReturned(_Event, frozen=True):
    """The trainer that got the batch is gone without having acknowledged it: its groups can be packed again."""

    batch: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


class StepEnded(_Event, frozen=True):
    """The trainer wants nothing more of this step and purpose."""

    step: int
    purpose: Purpose
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


class VersionPublished(_Event, frozen=True):
    """A newer weight version can be pulled."""

    version: int
    endpoint: str
    public_key: str
    manifest_hash: bytes
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.FIT | FollowUp.PLACE


class WindowSet(_Event, frozen=True):
    """Reserved engines may generate, or no longer; see `reserved.slowest_pace`."""

    open: bool
    at: float
    token_s: float = 0.0
    read_s: float = 0.0
    follow_up: ClassVar[FollowUp] = FollowUp.FIT | FollowUp.PLACE


class Reported(_Event, frozen=True):
    """What the trainer wants seen."""

    phase: str
    step: int
    values: dict[str, float]
    at: float


class RequestDone(_Event, frozen=True):
    """A request whose repetition would not be harmless took effect."""

    request: int
    digest: bytes
    """Of the request; for a BatchRequest its answer follows, in the wire's form."""


class TrainerHeard(_Event, frozen=True):
    """A sign of life of the trainer."""

    at: float
    durable: ClassVar[bool] = False


class TrainerGreeted(_Event, frozen=True):
    """A trainer's process came, or came back."""

    trainer: str
    at: float


class NumbersTaken(_Event, frozen=True):
    """Peers know of numbers that this ledger does not: its journal is younger than they are. None of them is used."""

    group: int
    batch: int
    assignment: int
    """Each: all numbers below it are taken."""
    at: float


class RunFinished(_Event, frozen=True):
    """The trainer's last words."""

    ok: bool
    message: str
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


# --- engines ----------------------------------------------------------------------------------------------------------


class EngineGreeted(_Event, frozen=True):
    """An engine joined, or greeted again within its lease."""

    engine: str
    pool: Pool
    max_running: int
    kv_tokens: int
    max_context: int
    version: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.FIT | FollowUp.PLACE


class EngineHeard(_Event, frozen=True):
    """A sign of life."""

    engine: str
    at: float
    durable: ClassVar[bool] = False


class EngineLoad(_Event, frozen=True):
    """What an engine says of its load."""

    engine: str
    running: int
    queued: int
    kv_free_tokens: int
    durable: ClassVar[bool] = False


class EngineServing(_Event, frozen=True):
    """An engine serves `version`, verified; -1: nothing."""

    engine: str
    version: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.FIT | FollowUp.PLACE


class WeightsAwaited(_Event, frozen=True):
    """An engine could not load; the version is announced to it again at `retry_at` (inf: it was)."""

    engine: str
    retry_at: float
    durable: ClassVar[bool] = False


STRAGGLER: Final = "straggler"
"""Cause of a strike after which tokens alone prove nothing."""


class EngineQuarantined(_Event, frozen=True):
    """An engine failed and gets no work before `quarantined_until`."""

    engine: str
    quarantined_until: float
    cause: str
    at: float


class EngineRestored(_Event, frozen=True):
    """A straggler gets work like any other again."""

    engine: str
    cause: str
    """`proven` (it is slow no longer) or `needed` (too few others are left)."""
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.FIT | FollowUp.PLACE


class EngineDraining(_Event, frozen=True):
    """An engine gets nothing new, and at `drain_at` what it still runs is moved."""

    engine: str
    drain_at: float
    reason: str
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.FIT | FollowUp.PLACE


class DrainExpired(_Event, frozen=True):
    """The drain deadline has passed and nothing is left there."""

    engine: str


class EngineGone(_Event, frozen=True):
    """An engine's lease is over; it runs nothing that counts any more."""

    engine: str
    cause: str
    """`bye` or `silent`."""
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.FIT | FollowUp.PLACE


class GapSeen(_Event, frozen=True):
    """Tokens of an assignment are missing; they were asked for."""

    assignment: int
    at: float
    durable: ClassVar[bool] = False


# --- time and noise ---------------------------------------------------------------------------------------------------


class LeasesRenewed(_Event, frozen=True):
    """We ourselves were away; nobody's silence before `at` counts, which may be in the future."""

    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE
    durable: ClassVar[bool] = False


class Ticked(_Event, frozen=True):
    """Deadlines were looked through; the next one is at `due`."""

    due: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE
    durable: ClassVar[bool] = False


class Ignored(_Event, frozen=True):
    """A message without effect, counted by kind."""

    kind: str
    durable: ClassVar[bool] = False


Event: TypeAlias = (
    GroupSubmitted
    | Assigned
    | PlacementHeld
    | PlacementPaused
    | BalancePaused
    | TokensTaken
    | RecallSent
    | Moved
    | TurnEnded
    | VerdictRequested
    | TurnExtended
    | SampleScored
    | GroupCompleted
    | GroupDiscarded
    | BatchRequested
    | BatchRequestClosed
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
    | EngineQuarantined
    | EngineRestored
    | EngineDraining
    | DrainExpired
    | EngineGone
    | GapSeen
    | LeasesRenewed
    | Ticked
    | Ignored
)
