"""What can happen to a ledger: every decision ends in events, and a journal may keep them.

Applying the same events in the same order rebuilds the same state. Events that are not `durable` hold only what a
restart would learn anew (signs of life, load, timers); a journal may leave them out.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from polyrl.ledger.causes import MoveCause, QuarantineCause, RestPhase
from polyrl.ledger.event import Event as Event, FollowUp as FollowUp
from polyrl.sample import DiscardReason, Finish, Group, Pool, Purpose
from polyrl.weights import WeightsRef
from polyrl.wire import BatchRequest, EngineCapacity


class GroupSubmitted(Event, frozen=True):
    """The trainer wants these n samples."""

    group: Group
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class Assigned(Event, frozen=True):
    """A waiting sample goes to an engine."""

    assignment: int
    sample: str
    engine: str
    kv: int
    at: float
    reading: int = 0
    """Tokens that it must read before the first new one."""


class Reclaimed(Event, frozen=True):
    """An engine that had been silent still holds a sample that left it: its old assignment goes on from response
    position `length`, where it was left; what another engine has made since is dropped."""

    assignment: int
    sample: str
    engine: str
    length: int
    kv: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class PlacementPaused(Event, frozen=True):
    """What waits is looked at again at `until`: for the engine with its prefix, or the rest of a share, no longer."""

    until: float
    durable: ClassVar[bool] = False


class BalancePaused(Event, frozen=True):
    """The search for better places was long: the next one waits until `until`."""

    at: float
    until: float
    durable: ClassVar[bool] = False


class TokensTaken(Event, frozen=True):
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


class RecallSent(Event, frozen=True):
    """A healthy engine was sent a Recall; the sample goes on at `to`, which sets `kv` tokens aside."""

    assignment: int
    cause: MoveCause
    to: str
    kv: int
    durable: ClassVar[bool] = False


class Moved(Event, frozen=True):
    """An assignment ends unfinished; its sample waits again with all its tokens."""

    assignment: int
    cause: MoveCause
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class TurnEnded(Event, frozen=True):
    """The engine's part of a turn is over, and the trainer is asked for its verdict until `ask_due` at least."""

    sample: str
    finish: Finish
    ask_due: float
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class VerdictRequested(Event, frozen=True):
    """The verdict was asked for again."""

    sample: str
    ask_due: float
    durable: ClassVar[bool] = False


class TurnExtended(Event, frozen=True):
    """An environment wrote `ids` (uint32); the sample waits for an engine again."""

    sample: str
    ids: bytes
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class SampleScored(Event, frozen=True):
    """The sample is finished and worth `reward`."""

    sample: str
    reward: float
    metrics: dict[str, float]
    at: float


class GroupCompleted(Event, frozen=True):
    """All samples are scored and the group passed the filter."""

    group: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


class GroupDiscarded(Event, frozen=True):
    """No sample of the group is trained: `culprit`, or all where it is none, for `reason`, others groupIncomplete."""

    group: int
    culprit: str
    reason: DiscardReason
    detail: str
    notify: bool
    """The trainer did not ask for it and must be notified."""
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE | FollowUp.PACK


class BatchRequested(Event, frozen=True):
    """A BatchRequest waits for its answer."""

    wanted: BatchRequest
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK | FollowUp.PLACE


class BatchRequestClosed(Event, frozen=True):
    """A BatchRequest was answered with nothing: late, empty or refused."""

    request: int


class BatchPacked(Event, frozen=True):
    """These complete groups answer what was wanted."""

    batch: int
    wanted: BatchRequest
    groups: list[int]
    last: bool
    at: float


class BatchAcknowledged(Event, frozen=True):
    """The batch is part of the trainer's state; its samples have ended well."""

    batch: int
    at: float
    kept: bool = False
    """Until BatchReleased, should a successor's state not contain it: then it is returned."""
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class BatchReleased(Event, frozen=True):
    """An acknowledged batch is forgotten: a checkpoint contains it, or too much is kept (`early`)."""

    batch: int
    early: bool
    at: float


class BatchReturned(Event, frozen=True):
    """Whoever got the batch is gone, or did not take it: its groups can be packed again."""

    batch: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


class DropsKnown(Event, frozen=True):
    """The trainer knows that these groups were dropped."""

    groups: list[int]
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


class StepEnded(Event, frozen=True):
    """The trainer wants nothing more of this step and purpose."""

    step: int
    purpose: Purpose
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


class VersionPublished(Event, frozen=True):
    """A newer weight version can be pulled."""

    weights: WeightsRef
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class BatchHeld(Event, frozen=True):
    """A batch is held back until `until`, while reserved engines go on generating, see `scheduling.window`."""

    until: float
    durable: ClassVar[bool] = False


class WindowSet(Event, frozen=True):
    """Reserved engines may generate, or no longer; see `window.slowest_pace`."""

    open: bool
    at: float
    token_s: float = 0.0
    read_s: float = 0.0
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class Reported(Event, frozen=True):
    """What the trainer wants seen."""

    phase: str
    step: int
    values: dict[str, float]
    at: float


class RequestDone(Event, frozen=True):
    """A request whose repetition would not be harmless took effect."""

    request: int
    digest: bytes
    """Digest of the request; for a BatchRequest its answer follows, in the wire's form."""


class TrainerHeard(Event, frozen=True):
    """A sign of life of the trainer."""

    at: float
    durable: ClassVar[bool] = False


class TrainerGreeted(Event, frozen=True):
    """A trainer's process came, or came back."""

    trainer: str
    at: float
    covers: bool = False
    """It says when a checkpoint contains what it acknowledged."""


class NumbersTaken(Event, frozen=True):
    """Peers know of numbers that this ledger does not: its journal is younger than they are. None of them is used."""

    group: int
    batch: int
    assignment: int
    """Each: all numbers below it are taken."""
    at: float


class RunFinished(Event, frozen=True):
    """The trainer has ended the run."""

    ok: bool
    message: str
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PACK


class EngineGreeted(Event, frozen=True):
    """An engine joined, or greeted again within its lease with something new."""

    engine: str
    pool: Pool
    capacity: EngineCapacity
    version: int
    at: float
    versions: tuple[int, ...] = ()
    """Others that it has verified."""
    seq: int = -1
    sleeps: bool = False
    asleep: bool = False
    """As in its Hello."""
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE | FollowUp.PACK


class EngineGreetedAgain(Event, frozen=True):
    """An engine greeted within its lease by a Hello with that `seq`, and nothing about it has changed."""

    engine: str
    at: float
    seq: int = -1
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class EngineHeard(Event, frozen=True):
    """A sign of life."""

    engine: str
    at: float
    durable: ClassVar[bool] = False


class EngineSilent(Event, frozen=True):
    """No sign of life for a lease: it gets no new work, and what it runs may be moved."""

    engine: str
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class EngineReturned(Event, frozen=True):
    """A sign of life of one that was silent, and is not gone."""

    engine: str
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class EngineLoad(Event, frozen=True):
    """An engine's load, as it reports it."""

    engine: str
    running: int
    queued: int
    kv_free_tokens: int
    durable: ClassVar[bool] = False


class EngineServing(Event, frozen=True):
    """An engine serves `version`, verified; -1: nothing."""

    engine: str
    version: int
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class EngineTried(Event, frozen=True):
    """An engine without measure or work, by its agent: seconds per step of one sequence, and per token that is read."""

    engine: str
    at: float
    step_s: float
    read_s: float


class EngineRests(Event, frozen=True):
    """An engine on the trainer's devices was ordered to sleep or to wake by `due`, or sleeps."""

    engine: str
    phase: RestPhase
    due: float
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE | FollowUp.PACK


class WakingPutOff(Event, frozen=True):
    """Waking engines would cost more than it gains; looked at again `until` then."""

    until: float
    durable: ClassVar[bool] = False


class WeightsAwaited(Event, frozen=True):
    """An engine could not load; the version is announced to it again at `retry_at` (inf: it was)."""

    engine: str
    retry_at: float
    durable: ClassVar[bool] = False


class EngineQuarantined(Event, frozen=True):
    """An engine failed and gets no work before `quarantined_until`."""

    follow_up: ClassVar[FollowUp] = FollowUp.PLACE
    engine: str
    quarantined_until: float
    cause: QuarantineCause
    at: float


class EngineDeparted(Event, frozen=True):
    """By the trainer's report of a step an engine's tokens are others than the fleet's; no work before `until`."""

    engine: str
    step: int
    text: str
    until: float
    at: float


class EngineDraining(Event, frozen=True):
    """An engine gets nothing new, and at `drain_at` what it still runs is moved."""

    engine: str
    drain_at: float
    reason: str
    """Empty when only the deadline is new."""
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class DrainExpired(Event, frozen=True):
    """The drain deadline has passed and nothing is left there."""

    engine: str


class EngineGone(Event, frozen=True):
    """An engine's lease is over; it runs nothing that counts any more."""

    engine: str
    cause: str
    """A GoneCause; text, so that an audit can say which other one a history holds."""
    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE | FollowUp.PACK


class GapSeen(Event, frozen=True):
    """Tokens of an assignment are missing; they were asked for."""

    assignment: int
    at: float
    durable: ClassVar[bool] = False


class TextSent(Event, frozen=True):
    """An engine did not have the text that it was thought to have, and got all of it."""

    assignment: int
    at: float
    durable: ClassVar[bool] = False


class LeasesRenewed(Event, frozen=True):
    """We ourselves were away; nobody's silence before `at` counts, which may be in the future, nor their speed; who was
    silent already stays so until heard. Durable for the sake of that: who replays the tokens must measure the same."""

    at: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE


class Ticked(Event, frozen=True):
    """Deadlines were looked through; the next is at `due`, of running samples `stall_due`, of verdicts `ask_due`."""

    due: float
    stall_due: float
    ask_due: float
    follow_up: ClassVar[FollowUp] = FollowUp.PLACE | FollowUp.PACK
    durable: ClassVar[bool] = False


class Ignored(Event, frozen=True):
    """A message without effect, counted by kind."""

    kind: str
    durable: ClassVar[bool] = False


EVENT_TYPES: Final = tuple(Event.__subclasses__())

if TYPE_CHECKING:
    AnyEvent: TypeAlias = Event
else:
    AnyEvent = reduce(or_, EVENT_TYPES)  # the tagged union that decoders need
