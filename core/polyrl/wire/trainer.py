"""Messages between the trainer and the manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec

from polyrl.sample import DiscardReason, Group, Purpose, Response, Scored
from polyrl.status import MAX_COUNT, MAX_NAME
from polyrl.weights import WeightsRef
from polyrl.wire.agent import Fenced, Message, shorten

MAX_METRICS_BYTES: Final = 8 << 10
"""What the metrics of one sample may take: 256 of them with names of 16 letters. A batch carries those of thousands."""

NUMBER_BYTES: Final = 16
"""What a named number takes beside its name, at most."""


def excess_of_metrics(metrics: Mapping[str, float]) -> str:
    """Why a sample may not have these metrics, after "its metrics"; empty: it may."""
    size = sum(NUMBER_BYTES + len(name.encode()) for name in metrics)
    if size <= MAX_METRICS_BYTES:
        return ""
    counted = f"names, and {NUMBER_BYTES} for each number"
    return (
        f"take {size} bytes ({counted}); at most {MAX_METRICS_BYTES} are carried: give fewer of them, or shorter names"
    )


class TrainerHello(Message, frozen=True, tag="thello"):
    """First message of the trainer, repeated after each reconnect."""

    run_epoch: int
    acknowledged: int
    """The trainer's state contains every batch up to this number; -1 for none that it could say so of."""
    trainer: str = ""
    """Names the trainer's process; a new name means that it has started again, from a checkpoint or from nothing."""
    next_group: int = 0
    """Groups below it were accepted before, by this manager or by one whose journal is lost."""
    next_batch: int = 0
    """Batches below it came to this trainer before."""
    fresh: bool = False
    """It has not been welcomed yet: it wants to know what is held for it."""
    acknowledged_above: tuple[tuple[int, int], ...] = ()
    """Further batches that the trainer's state contains, as half-open ranges of numbers, ascending."""
    covers: bool = False
    """It says Covered after each checkpoint: until then what it acknowledged is kept, for a successor without it."""


class Submit(Message, frozen=True, tag="submit"):
    """Generate these groups. A group that was submitted before is ignored, so a repeat is harmless; another one under
    its number is declined."""

    request: int
    groups: tuple[Group, ...]


class Score(Message, frozen=True, tag="score"):
    """A verdict: the sample is finished and worth `reward`."""

    request: int
    sample: str
    turn: int
    reward: float
    metrics: dict[str, float] = {}  # noqa: RUF012 - msgspec copies mutable defaults


class Extend(Message, frozen=True, tag="extend"):
    """Another verdict: an environment wrote `ids`; generate the next turn after them."""

    request: int
    sample: str
    turn: int
    """The turn that ended; the next one is turn + 1."""
    ids: bytes
    """uint32"""


class Reject(Message, frozen=True, tag="reject"):
    """The third verdict: no reward can be had for this sample."""

    request: int
    sample: str
    reason: DiscardReason
    detail: str

    def __post_init__(self) -> None:
        shorten(self, "detail")


class BatchRequest(Message, frozen=True, tag="next"):
    """Ask for a batch of complete, scored groups of `step`; answered by Batch, or by Late after `deadline_s`.

    The answer holds at least `min_samples` unless fewer are left, and never more than `max_samples` samples or
    `max_tokens` tokens (one group may exceed max_tokens alone). Repeating an answered request repeats its answer.
    """

    request: int
    step: int
    purpose: Purpose
    min_samples: int
    max_samples: int
    max_tokens: int
    deadline_s: float
    alone: bool = False
    """It is learned where there is no room beside engines: it comes when those on the trainer's devices sleep."""


class Withdraw(Message, frozen=True, tag="withdraw"):
    """The trainer takes no answer to a BatchRequest any more: a batch that has answered it goes to another request."""

    request: int
    asked: int
    """Number of that BatchRequest."""


class NoticesTaken(Message, frozen=True, tag="noticed"):
    """The trainer has the GroupDropped of these groups; it needs no answer, for what is not taken comes again."""

    groups: tuple[int, ...]


class Acknowledge(Message, frozen=True, tag="ack"):
    """The batch is part of the trainer's state; its tokens may be forgotten."""

    request: int
    batch: int


class Covered(Message, frozen=True, tag="covered"):
    """A checkpoint that survives the trainer contains these acknowledged batches: they need not be kept."""

    request: int
    batches: tuple[tuple[int, int], ...]
    """Half-open ranges of numbers, ascending."""


class Fetch(Message, frozen=True, tag="fetch"):
    """Send what these samples say: a TurnDone with the whole text for each whose verdict is awaited, a FetchedText for
    each that has its reward; then Fetched. Not a request: a connection's end is its end."""

    request: int
    """Named in Fetched."""
    samples: tuple[str, ...]


class EndStep(Message, frozen=True, tag="endstep"):
    """The trainer has all it needs of `step`: what is left of it is cancelled, with reason `surplus`."""

    request: int
    step: int
    purpose: Purpose


class PublishVersion(Message, frozen=True, tag="publish"):
    """A new weight version can be pulled at `endpoint`."""

    request: int
    version: int
    endpoint: str
    public_key: str
    manifest_hash: bytes
    content: bytes = b""
    """Hash of the weights alone: the same for two versions of the same weights; empty: it is not known."""
    vocabulary: int = 0
    """The model's number of tokens; 0: it is not known, and ids are not checked."""
    receipt: bytes = b""
    """Receipt by which engines show that they have pulled it; empty: not known, and they are believed."""
    positions: int = 0
    """Tokens that the model allows in a context; 0: not known, and the longest that an engine claims is believed."""
    others: tuple[str, ...] = ()
    """Endpoints of the learner's further machines."""

    @classmethod
    def of(cls, request: int, weights: WeightsRef) -> PublishVersion:
        return cls(
            request,
            weights.version,
            endpoint=weights.endpoint,
            public_key=weights.public_key,
            manifest_hash=weights.manifest_hash,
            content=weights.content,
            vocabulary=weights.vocabulary,
            receipt=weights.receipt,
            positions=weights.positions,
            others=weights.others,
        )

    @property
    def weights(self) -> WeightsRef:
        return WeightsRef(
            self.version,
            self.endpoint,
            public_key=self.public_key,
            manifest_hash=self.manifest_hash,
            content=self.content,
            vocabulary=self.vocabulary,
            receipt=self.receipt,
            positions=self.positions,
            others=self.others,
        )


class EngineMeasure(msgspec.Struct, frozen=True, array_like=True):
    """What a step's trained tokens of one engine look like to the learner; see `ledger.measures.departures`."""

    engine: str
    cohort: int
    """Numbers those whose tokens met the same learner; within one report."""
    tokens: int
    drift: float
    """Mean of |learner's logprob - engine's|, in nats."""
    surprise: float
    """Mean of -learner's logprob less the entropy at the position, in nats."""


def engine_shares(rows: Sequence[EngineMeasure]) -> dict[str, float]:
    """Share of a step's trained tokens, by the engine that drew them."""
    tokens: Counter[str] = Counter()
    for row in rows:
        tokens[row.engine] += row.tokens
    total = max(1, sum(tokens.values()))
    return {engine: count / total for engine, count in tokens.items()}


class TrainerReport(Message, frozen=True, tag="report"):
    """What the trainer wants seen: a step or an evaluation in named numbers. In status the newest one wins."""

    request: int
    phase: str
    step: int
    values: dict[str, float]
    samples: tuple[bytes, ...] = ()
    """A few to read, each a line of samples.jsonl, `sample_record.MAX_REPORTED_BYTES` in all at most."""
    engines: tuple[EngineMeasure, ...] = ()
    """Measures of the engines that drew a training step's tokens."""


class FinishRun(Message, frozen=True, tag="finish"):
    """The job is over; the manager cancels what is left, sends StartDrain to all agents and ends."""

    request: int
    ok: bool
    message: str


class HeldGroup(msgspec.Struct, frozen=True, array_like=True):
    """A live group of an earlier trainer. A trainer that would submit the same one takes this instead."""

    id: int
    step: int
    purpose: Purpose
    digest: bytes
    """`sample.group_digest`"""
    min_version: int
    max_version: int
    scored: int
    """Samples that have their verdict."""
    turn: int
    """Newest turn of any of its samples."""
    complete: bool = False
    """All samples have their verdict, and the group has passed the filter."""
    content: bytes = b""
    """Hash of the weights of `max_version`, as in PublishVersion."""


class TrainerWelcome(Message, frozen=True, tag="twelcome"):
    """The trainer is in; requests it still holds unanswered must be sent again."""

    run_epoch: int
    lease_s: float
    beat_s: float
    journal: str = ""
    """Names the journal; another name than before means that the old one is lost, and with it what was open."""
    next_group: int = 0
    """Numbers below it are taken."""
    version: int = -1
    """Newest published; -1 for none."""
    manifest_hash: bytes = b""
    """Hash of that version's manifest."""
    held: tuple[HeldGroup, ...] = ()
    """To a fresh trainer: what its predecessor submitted and did not acknowledge."""
    content: bytes = b""
    """Hash of that version's weights, as in PublishVersion."""


class Accepted(Message, frozen=True, tag="accepted"):
    """The request took effect (or had already)."""

    request: int


class Declined(Message, frozen=True, tag="refused"):
    """The request cannot take effect; `reason` is one sentence."""

    request: int
    reason: str


class TurnDone(Message, frozen=True, tag="turn"):
    """A turn of a sample has ended; answer with Score, Extend or Reject.

    It travels in parts: see `texts`, where the trainer's side makes whole ones of them."""

    group: int
    index: int
    purpose: Purpose
    step: int
    response: Response
    start: int = 0
    """Response position of the first token in it; what is before, the trainer had with an earlier turn."""
    check: int = 0
    """CRC-32 of the ids before `start`."""


class TurnsAwaited(Message, frozen=True, tag="awaited"):
    """Turns whose verdict is awaited. Sent after a greeting, and again and again; the trainer fetches those that it
    does not have."""

    turns: tuple[tuple[str, int], ...]
    """Sample and turn."""


class FetchedText(Message, frozen=True, tag="text"):
    """What a sample says that has its reward; answer to Fetch, in the form of a TurnDone from position 0."""

    response: Response


class Fetched(Message, frozen=True, tag="fetched"):
    """Answer to Fetch, after the texts: as many as one answer may carry."""

    request: int
    count: int
    """The first `count` of the samples that were asked for were sent, or are not here any more."""


class Batch(Message, frozen=True, tag="batch"):
    """Answer to BatchRequest: complete groups in arrival order; empty with `last` when the step has no more to give.

    It travels without texts, which the trainer had with the turns: see `texts`, where they are put back."""

    request: int
    number: int
    step: int
    samples: tuple[Scored, ...]
    last: bool
    """No further groups of this step and purpose exist: all are packed or discarded, and the trainer knows of each
    that was dropped."""
    checks: tuple[int, ...] = ()
    """CRC-32 of each response's ids, while its text is left out."""


class Late(Message, frozen=True, tag="late"):
    """Answer to BatchRequest whose deadline passed; `waiting_for` names who is awaited, since when."""

    request: int
    waiting_for: str


class GroupDropped(Message, frozen=True, tag="dropped"):
    """No sample of this group will be trained; the trainer may submit another in its place."""

    group: int
    step: int
    purpose: Purpose
    reason: DiscardReason
    detail: str


class VersionServed(Message, frozen=True, tag="versionServed"):
    """The first engine has verified the newest version. May be repeated; a trainer that is away does not hear it."""

    version: int


class TrainerHeartbeat(Message, frozen=True, tag="tbeat"):
    """Sign of life, in either direction."""


class FetchReport(Message, frozen=True, tag="fetching"):
    """How much of its model a trainer's pod has, from what fetches it there before its trainer begins: no greeting
    comes before, no answer follows, and one that is lost is made up for by the next."""

    pod: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    place: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    """What is fetched, as the manifest names it."""
    fetched: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
    """Bytes that have come."""
    total: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
    """Bytes that there are; 0: that is not known."""


FromTrainer: TypeAlias = (
    TrainerHello
    | Submit
    | Score
    | Extend
    | Reject
    | BatchRequest
    | Withdraw
    | NoticesTaken
    | Acknowledge
    | Covered
    | Fetch
    | EndStep
    | PublishVersion
    | TrainerReport
    | FinishRun
    | TrainerHeartbeat
)
FromTrainerPod: TypeAlias = FromTrainer | FetchReport
"""What comes to the manager's socket of trainers; the ledger sees what a trainer itself says."""
ToTrainer: TypeAlias = (
    TrainerWelcome
    | Accepted
    | Declined
    | TurnDone
    | TurnsAwaited
    | FetchedText
    | Fetched
    | Batch
    | Late
    | GroupDropped
    | VersionServed
    | Fenced
    | TrainerHeartbeat
)
