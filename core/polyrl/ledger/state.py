"""The ledger's whole memory, as plain values that msgpack can hold. Only `apply` changes it.

No object refers to another by reference, only by number or name, so a snapshot is one `msgspec.msgpack.encode`.
What has ended is deleted: memory follows live samples, and history belongs to whoever consumes the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from math import inf
from typing import Final

import msgspec

from polyrl.ledger.causes import MoveCause
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.measures.learner import LearnerState
from polyrl.ledger.measures.lengths import LengthTable
from polyrl.ledger.measures.rests import Rest
from polyrl.ledger.measures.usage import EngineWork, Usage
from polyrl.sample import (
    ENVIRONMENT_VERSION,
    Finish,
    Group,
    Pool,
    Purpose,
    Response,
    Scored,
    Span,
    sample_id,
    split_sample_id,
)
from polyrl.weights import WeightsRef
from polyrl.wire import Assign, BatchRequest, EngineCapacity, GroupDropped, TurnDone, checksum_of
from polyrl.wire.ranges import has_number

REJECTIONS_TO_PAUSE: Final = 3
"""Assignments in a row that an engine refuses before it pauses: one prompt that is at fault may come by twice."""


class SamplePhase(StrEnum):
    """Where a live sample is; the two ends (acknowledged, discarded) are not live."""

    WAITING = "waiting"
    """It needs an engine."""
    ASSIGNED = "assigned"
    """An engine generates its turn."""
    TURN_DONE = "turnDone"
    """Its turn is over, and the trainer is asked for a verdict."""
    SCORED = "scored"
    """It has its reward, and waits for a batch."""
    PACKED = "packed"
    """It is in a batch that the trainer has not acknowledged."""
    KEPT = "kept"
    """It is acknowledged, but no checkpoint contains it."""


class OpenSpan(msgspec.Struct, array_like=True):
    """A `sample.Span` that may still grow."""

    start: int
    end: int
    version: int
    engine: str
    attempt: int


class SampleState(msgspec.Struct, array_like=True):
    """One live sequence."""

    group: int
    index: int
    since: float
    """When it entered its phase."""
    phase: SamplePhase = SamplePhase.WAITING
    assignment: int = 0
    """0: none."""
    attempt: int = 0
    """Assignments so far."""
    ids: bytearray = msgspec.field(default_factory=bytearray)
    """uint32[T], the response so far."""
    logprobs: bytearray = msgspec.field(default_factory=bytearray)
    """float32[T]"""
    generated: int = 0
    """Tokens of the response that engines made; the budget counts these."""
    spans: list[OpenSpan] = msgspec.field(default_factory=list)
    turn: int = 0
    turn_start: int = 0
    """Response position where this turn's generation began."""
    finish: Finish | None = None
    asks: int = 0
    """Times TurnDone was sent for this turn."""
    ask_due: float = inf
    reward: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    rejections: int = 0
    """How often engines refused it."""
    avoid: str = ""
    """Name of the engine that failed this sample last; empty when the last one left it for another cause."""
    moved_at: float = -inf
    length_class: int = -1
    """Length class of its turn, see `lengths`; -1: it has no token."""
    kept_by: str = ""
    """The engine that ended its last turn; empty once it is assigned again. Who has which text, `kept_until` says."""
    trainer_has: int = 0
    """Response tokens that the trainer's process holds: to the end of what it wrote itself, by its last Extend."""
    rejected_by: list[str] = msgspec.field(default_factory=list)
    """Engines that refused it, each once: `max_rejections`, or a few more while one that works was not asked."""
    avoid_until: float = -inf
    left: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Engines that fell silent with this turn and may hold more of it: the assignment, and its length then."""
    rewinds: int = 0
    refused_at: float = inf
    """How often tokens were dropped for those that such an engine held; and when it was first refused, inf: never."""

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return len(self.ids) >> 2


class Assignment(msgspec.Struct, array_like=True):
    """One attempt of one sample on one engine, while it lasts."""

    sample: str
    engine: str
    low: int
    high: int
    """Weight versions that may generate: low <= version <= high."""
    length: int
    """Response position of the next token."""
    limit: int
    """Response position at which the budget ends."""
    kv: int
    """KV room set aside on the engine, in tokens."""
    at: float
    progress_at: float
    reading: int = 0
    """Tokens that its engine reads; 0 once the first token has come, or if they are too few to measure."""
    recall_cause: MoveCause | None = None
    """Why its engine was asked to give it back; None: it was not."""
    recall_target: str = ""
    """Engine to which its sample goes then."""
    kv_end: int = 0
    """Response position up to which KV room is set aside."""
    text_sent_at: float = -inf
    begun: bool = False
    """When its engine, which had not the text it was thought to have, last got all of it; whether a token has come."""


class GroupState(msgspec.Struct, array_like=True):
    """One live prompt."""

    group: Group
    waiting: list[int]
    """Indices of its waiting samples, ascending."""
    scored: int = 0
    ready: bool = False
    """All scored and past the filter."""
    batch: int = -1
    tokens: int = 0
    """What it adds to the backlog."""
    trained_in: int = -1
    """An acknowledged batch that no trainer's state contains any more: what was in it is handed out together again."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Its place in the queue: by priority; of equals evaluation first, which is short and awaited; then by step, so
        that a replacement for the step that is awaited goes before what is generated ahead; then by age."""
        group = self.group
        return (-2 * group.priority - (group.purpose is Purpose.EVAL), group.step, group.id)


class LeasedEngine(msgspec.Struct):
    """One engine whose lease runs."""

    name: str
    pool: Pool
    capacity: EngineCapacity
    version: int = -1
    greeted_at: float = 0.0
    """For the first time or again."""
    heard_at: float = 0.0
    served: list[int] = msgspec.field(default_factory=list)
    """Versions it has verified, newest last; tokens of others are refused."""
    running: dict[int, None] = msgspec.field(default_factory=dict)
    """Live assignment numbers, oldest first."""
    kv: int = 0
    """KV room set aside for them, in tokens."""
    reserved_kv: dict[int, int] = msgspec.field(default_factory=dict)
    """KV room, in tokens, set aside for samples that other engines were asked to give back, by their assignment."""
    recalled: int = 0
    """How many of its running samples it was asked to hand back."""
    draining: str = ""
    drain_at: float = inf
    """Why it drains, empty when it does not; and until when, -inf once that has passed and everything was moved."""
    gaps: dict[int, float] = msgspec.field(default_factory=dict)
    """Assignments whose tokens have a gap, and when they were asked for. Until it is filled no frame is called safe."""
    failures: int = 0
    """Failures in a row."""
    rejections: int = 0
    """Assignments in a row that it refused, none giving a token."""
    quarantined_until: float = -inf
    """Until then it gets no work; while it is `unproven` it gets one sample after it."""
    weights_at: float = inf
    """When its failed version is announced again."""
    tokens: int = 0
    """Accepted since it greeted."""
    token_at: float = -inf
    assigned_at: float = -inf
    tried_at: float = -inf
    """When it last got a sample, and when its agent said what it had tried."""
    on_trial: bool = False
    """Its measurement was old when it got a sample; the next window replaces it."""
    window_at: float = 0.0
    window_tokens: int = 0
    window_load: float = 0.0
    """Running samples, integrated over the window: sample-seconds."""
    tokens_per_s: float = 0.0
    step_scale: float = 0.0
    """Seconds per decoding step at batch size 0, see `speed`; 0: not measured, as below."""
    half_batch: float = 0.0
    """Running samples at which a step takes twice as long."""
    prefill_s: float = 0.0
    """Seconds per token to read."""
    starting: int = 0
    """Assignments that have given no token yet."""
    reading: int = 0
    unread: int = 0
    """Those of which it reads the prompt, as far as they are long enough to measure, and tokens of those."""
    read_from: float = 0.0
    read_at: float = -inf
    read_tokens: int = 0
    """Since when it reads without a pause, when it last had read one of them, and tokens of those read since."""
    line: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Forgetting moments of (running, seconds per step) per window: sums of 1, b, s, bb, bs."""
    load: tuple[int, int, int] = (0, 0, 0)
    load_at: float = -inf
    """running, queued, free KV tokens, as it last reported, and when."""
    kv_since: int = 0
    kv_growth: int = 0
    """KV tokens that came to what it runs since, less those that ended; room set aside for those still to come."""
    seq: int = -1
    """Its newest Deltas' number, before its greeting too; -1: unknown. `counts_from`: when the ledger was last back."""
    counts_from: float = -inf
    silent: bool = False
    bereft: bool = False
    """No sign of life for a lease; and some of what it ran was moved since, which it may still hold."""
    work: EngineWork = msgspec.field(default_factory=EngineWork)
    rest: Rest = msgspec.field(default_factory=Rest)

    @property
    def unproven(self) -> bool:
        """It failed, or refused all that it got last, and has given no token since."""
        return self.failures > 0 or self.rejections >= REJECTIONS_TO_PAUSE

    @property
    def occupied(self) -> int:
        """Slots that are taken or set aside."""
        return len(self.running) + len(self.reserved_kv)

    @property
    def expected_running(self) -> int:
        """Samples that it runs once all that is under way has arrived."""
        return self.occupied - self.recalled


class StepState(msgspec.Struct):
    """The groups of one step and purpose."""

    step: int
    purpose: Purpose
    submitted: int = 0
    open: int = 0
    """Groups that are neither complete nor dropped."""
    ready: list[int] = msgspec.field(default_factory=list)
    """Complete groups that are not packed, in order of completion; together they are `ready_samples`."""
    packed: int = 0
    """Groups in batches that are not acknowledged."""
    acknowledged: int = 0
    dropped: int = 0
    notices: list[GroupDropped] = msgspec.field(default_factory=list)
    """Groups dropped of which the trainer has not said that it knows; sent again when it reconnects."""
    ended: bool = False
    """The trainer wants nothing more of it; forgotten once nothing of it is left."""
    ready_samples: int = 0


class BatchState(msgspec.Struct):
    """A batch on its way to be acknowledged."""

    request: BatchRequest
    groups: list[int]
    last: bool


class PendingRequest(msgspec.Struct):
    """A BatchRequest that waits."""

    request: BatchRequest
    since: float
    due: float


class Counters(msgspec.Struct):
    """What has been, in numbers that never fall."""

    submitted: int = 0
    acknowledged: int = 0
    discarded: dict[str, int] = msgspec.field(default_factory=dict)
    tokens_accepted: int = 0
    tokens_in_vain: int = 0
    """Received for assignments that were over, or dropped for what a returning engine holds: generated twice."""
    tokens_repeated: int = 0
    """Received twice: sent again after a reconnect."""
    delta_frames: int = 0
    delta_bytes: int = 0
    migrations: dict[str, int] = msgspec.field(default_factory=dict)
    offered_again: int = 0
    """Acknowledged samples that a trainer from an older checkpoint was offered again."""
    released_early: int = 0
    """Acknowledged samples for which there was no room until a checkpoint contained them."""
    losses: int = 0
    """Engines that left without Deregister."""
    ignored: dict[str, int] = msgspec.field(default_factory=dict)
    """Messages without effect, by kind."""


class LedgerState(msgspec.Struct):
    """Everything."""

    config: LedgerConfig
    groups: dict[int, GroupState] = msgspec.field(default_factory=dict)
    samples: dict[str, SampleState] = msgspec.field(default_factory=dict)
    queue: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    """Keys of groups with waiting samples, sorted: see `GroupState.key`."""
    assignments: dict[int, Assignment] = msgspec.field(default_factory=dict)
    next_assignment: int = 1
    engines: dict[str, LeasedEngine] = msgspec.field(default_factory=dict)
    steps: dict[str, StepState] = msgspec.field(default_factory=dict)
    """By `step_key`."""
    seen: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """Half-open ranges of group numbers ever submitted, sorted; one range unless submissions were reordered."""
    lost_below: int = 0
    """Group numbers below it were taken over from a trainer whose manager had lost its journal."""
    ended: dict[int, bytes] = msgspec.field(default_factory=dict)
    """`sample.group_digest` of the groups that ended last, oldest first."""
    batches: dict[int, BatchState] = msgspec.field(default_factory=dict)
    kept: dict[int, list[int]] = msgspec.field(default_factory=dict)
    kept_tokens: int = 0
    """Groups of the acknowledged batches that no checkpoint contains, oldest first; their tokens with prompts."""
    covers: bool = False
    """The trainer says when a checkpoint contains what it acknowledged."""
    contents: dict[int, bytes] = msgspec.field(default_factory=dict)
    receipts: dict[int, bytes] = msgspec.field(default_factory=dict)
    """Fields of `PublishVersion` of the newest versions."""
    next_batch: int = 0
    pending: dict[int, PendingRequest] = msgspec.field(default_factory=dict)
    """By request number, in order of arrival."""
    awaiting_verdict: dict[str, None] = msgspec.field(default_factory=dict)
    """Samples whose verdict is awaited, oldest first."""
    answered: dict[int, bytes] = msgspec.field(default_factory=dict)
    """The newest requests whose repetition would do harm: digest, and a BatchRequest's answer without samples."""
    weights: WeightsRef = WeightsRef()
    published_at: float = -inf
    """The newest published, and when."""
    window_open: bool = True
    window_at: float = -inf
    """Whether reserved engines may generate, and since when."""
    learner: LearnerState = msgspec.field(default_factory=LearnerState)
    trainer_at: float = -inf
    """When the trainer was last heard; -inf: never greeted."""
    trainer: str = ""
    trainer_since: float = -inf
    """The process that greeted last, and when."""
    replaced: list[str] = msgspec.field(default_factory=list)
    """Trainers whose place another one has taken, newest last."""
    phase: str = ""
    step: int = 0
    values: dict[str, float] = msgspec.field(default_factory=dict)
    finished: bool = False
    ok: bool = False
    message: str = ""
    due: float = inf
    """When `tick` has something to do at the earliest; never too late, sometimes too early."""
    stall_due: float = inf
    ask_due: float = -inf
    """No running sample has its progress deadline before the one, no verdict is asked for again before the other."""
    balanced_at: float = -inf
    """When `rebalance` last searched so many samples that its next search waits."""
    counters: Counters = msgspec.field(default_factory=Counters)
    backlog: int = 0
    """Tokens, prompts included, of complete training groups that are not acknowledged."""
    lengths: LengthTable = msgspec.field(default_factory=LengthTable)
    """Lengths of turns, as far as they have come."""
    vanished: dict[str, tuple[int, float]] = msgspec.field(default_factory=dict)
    """Engines that went silent, leased ones too: how often in a row, and when last."""
    usage: Usage = msgspec.field(default_factory=Usage)

    @property
    def next_group(self) -> int:
        """The first group number above all that were submitted."""
        return self.seen[-1][1] if self.seen else 0

    def was_submitted(self, number: int) -> bool:
        """True for every group that a GroupSubmitted carried, live or ended; `seen` does not grow with the run."""
        return has_number(self.seen, number)


def step_key(step: int, purpose: Purpose) -> str:
    """How `LedgerState.steps` names a step's groups of one purpose."""
    return f"{purpose.value}/{step}"


def context_used(state: LedgerState, sample: SampleState) -> int:
    """Tokens of its prompt and its response so far."""
    return len(state.groups[sample.group].group.prompt_ids) // 4 + sample.length


def tokens_left(state: LedgerState, sample: SampleState, context: int) -> int:
    """What an engine of that `context` may generate of it: what is left of its budget, as far as there is room."""
    budget = state.groups[sample.group].group.sampling.max_new_tokens - sample.generated
    return min(budget, context - context_used(state, sample))


def response_part(name: str, sample: SampleState, start: int) -> Response:
    """What was generated and written from position `start` on, where a span begins, in the form that travels."""
    spans = [span for span in sample.spans if span.end > start]
    made = (sample.logprobs[4 * s.start : 4 * s.end] for s in spans if s.version != ENVIRONMENT_VERSION)
    return Response(
        sample=name,
        ids=bytes(sample.ids[4 * start :]),
        logprobs=b"".join(made),
        loss_mask=b"",
        spans=tuple(Span(s.start, s.end, version=s.version, engine=s.engine, attempt=s.attempt) for s in spans),
        turn=sample.turn,
        finish=sample.finish or Finish.STOP,
    )


def kept_until(sample: SampleState, engine: str) -> int:
    """Response position up to which an engine has the text: to the end of the last turn that ended there, however many
    others have had the sample since; 0 where what it generated last was no turn's end. One that forgot it says so."""
    after = None
    for span in reversed(sample.spans):
        if span.engine == engine:
            return span.end if after is not None and after.version == ENVIRONMENT_VERSION else 0
        after = span
    return 0


def assign_message(state: LedgerState, number: int, *, kept: int) -> Assign:
    """What an engine needs for a live assignment; `kept`: see `kept_until`, 0: it has nothing."""
    assignment = state.assignments[number]
    sample = state.samples[assignment.sample]
    group = state.groups[sample.group].group
    text = group.prompt_ids + sample.ids
    begin = len(group.prompt_ids) + 4 * kept if kept else 0
    return Assign(
        assignment=number,
        sample=assignment.sample,
        attempt=sample.attempt,
        input_ids=text[begin:],
        offset=sample.length,
        max_new_tokens=assignment.limit - sample.length,
        sampling=group.sampling,
        min_version=group.min_version,
        max_version=group.max_version,
        base=begin // 4,
        base_check=checksum_of(text[:begin]) if kept else 0,
        turn_start=next((span.end for span in reversed(sample.spans) if span.version == ENVIRONMENT_VERSION), 0),
    )


def turn_done(state: LedgerState, name: str, *, whole: bool = False) -> TurnDone:
    """The question for a sample's verdict; `whole`: the trainer misses what came with earlier turns."""
    number, index = split_sample_id(name)
    group, sample = state.groups[number].group, state.samples[name]
    start = 0 if whole else sample.trainer_has
    check, response = checksum_of(sample.ids[: 4 * start]), response_part(name, sample, start)
    return TurnDone(number, index, purpose=group.purpose, step=group.step, response=response, start=start, check=check)


def scored_group(state: LedgerState, number: int) -> Iterator[tuple[Scored, int]]:
    """The samples of a complete group by index, without their texts, and the checksums of those."""
    for index in range(state.groups[number].group.n):
        sample = state.samples[name := sample_id(number, index)]
        finish = sample.finish or Finish.STOP
        bare = Response(name, b"", logprobs=b"", loss_mask=b"", spans=(), turn=sample.turn, finish=finish)
        scored = Scored(number, index, response=bare, reward=sample.reward, metrics=sample.metrics)
        yield scored, checksum_of(sample.ids)


def group_tokens(state: LedgerState, number: int) -> int:
    """Prompt and response tokens of all its samples."""
    group = state.groups[number].group
    responses = sum(state.samples[sample_id(number, index)].length for index in range(group.n))
    return group.n * (len(group.prompt_ids) // 4) + responses
