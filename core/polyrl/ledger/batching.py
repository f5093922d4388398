"""From scored samples to batches: how groups end untrained, and which complete groups answer a batch request.

One sample's fate takes its siblings along, because group statistics need all n. A request gets whole groups in order of
completion, up to the limits, at least the minimum unless nothing more can come. The order is never bent: a group that
does not fit ends the batch, even if a later one would fit. So batches depend on the order of completion alone, and a
large group cannot be overtaken for ever.

An answer without samples (late, refused, nothing left) is remembered for as long as a repeated request may ask for it:
the trainer takes the first answer to a request, so a second one with samples would be trained by nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from polyrl import wire
from polyrl.ledger.events import BatchPacked, BatchRequestClosed, GroupDiscarded, RequestDone
from polyrl.ledger.state import LedgerState, StepState, group_tokens, scored_group, step_key
from polyrl.ledger.status import awaited
from polyrl.ledger.transition import Transition
from polyrl.manifest.parts.algorithm import GroupFilter
from polyrl.sample import DiscardReason, Purpose, sample_id
from polyrl.wire import Batch, BatchRequest, Declined, Late

DIGEST_BYTES: Final = 16
"""Bytes of the digest of an answered request, in the journal."""


def passes(group_filter: str, rewards: Sequence[float], of_turns: Sequence[Mapping[str, float]] = ()) -> bool:
    """Whether a training group with these rewards passes. Dynamic sampling is DAPO's (Yu et al. 2025): what has no
    gradient is left out, and a group has one where turns (`of_turns`, of each sample by name) were paid differently.
    `custom` passes everything here: the trainer decides it, through Reject."""
    if group_filter == GroupFilter.ANY_SUCCESS:
        return any(reward > 0 for reward in rewards)
    if group_filter == GroupFilter.NONZERO_SPREAD:
        return min(rewards) != max(rewards) or any(one != of_turns[0] for one in of_turns)
    return True


def discard_group(
    transition: Transition,
    number: int,
    reason: DiscardReason,
    culprit: str = "",
    detail: str = "",
    *,
    notify: bool = True,
) -> None:
    """Discards a live group: `culprit` for `reason`, its siblings as groupIncomplete; without one all for `reason`."""
    entry = transition.state.groups[number]
    for index in range(entry.group.n):
        assignment = transition.state.samples[sample_id(number, index)].assignment
        if assignment:
            transition.send(transition.state.assignments[assignment].engine, wire.Cancel(assignment))
    event = GroupDiscarded(number, culprit, reason=reason, detail=detail, notify=notify, at=transition.now)
    transition.record(event)
    if notify:
        # Kept by the step as well, for a trainer that comes back.
        transition.answer(transition.state.steps[step_key(entry.group.step, entry.group.purpose)].notices[-1])


class Packing(NamedTuple):
    """The answer to a BatchRequest."""

    groups: list[int]
    last: bool
    """Nothing else of this step and purpose is open or unpacked."""


def pack(state: LedgerState, wanted: BatchRequest) -> Packing | None:
    """The answer as far as the state allows one; None while the trainer must wait."""
    step = state.steps.get(step_key(wanted.step, wanted.purpose))
    if step is None:
        return Packing([], True)
    replayed = _trained_before(state, step, wanted)
    if replayed:
        return Packing(replayed, len(replayed) == len(step.ready) and not (step.open or step.notices))
    if (step.open or step.notices) and _is_too_little(state, step, wanted):
        return None
    groups: list[int] = []
    samples = tokens = 0
    most, full = min(wanted.max_samples, wire.MAX_BATCH_SAMPLES), False
    for number in step.ready:
        entry = state.groups[number]
        size, weight = entry.group.n, entry.tokens or group_tokens(state, number)
        if samples + size > most or (groups and tokens + weight > wanted.max_tokens):
            full = True
            break
        groups.append(number)
        samples += size
        tokens += weight
    # Who has not been notified of a dropped group yet is not answered that nothing more will come.
    exhausted = not (step.open or step.notices)
    enough = groups and samples >= min(wanted.min_samples, most)
    if enough or full or exhausted:
        return Packing(groups, exhausted and len(groups) == len(step.ready))
    return None


def _is_too_little(state: LedgerState, step: StepState, wanted: BatchRequest) -> bool:
    """Whether it is plain from sums that what is ready fills no batch: reading all of it at each end of a turn would
    cost the square of a step."""
    if wanted.purpose is not Purpose.TRAIN or state.backlog > wanted.max_tokens:
        return False
    return step.ready_samples < min(wanted.min_samples, wanted.max_samples, wire.MAX_BATCH_SAMPLES)


def _trained_before(state: LedgerState, step: StepState, wanted: BatchRequest) -> list[int]:
    """The groups of the next batch that a trainer without it trained before: the same ones together, since another
    division would give other sums, and so other weights. Empty when there is none, or it exceeds what is wanted."""
    batch = state.groups[step.ready[0]].trained_in if step.ready else -1
    if batch < 0:
        return []
    groups = list(takewhile(lambda number: state.groups[number].trained_in == batch, step.ready))
    samples = sum(state.groups[number].group.n for number in groups)
    tokens = sum(group_tokens(state, number) for number in groups)
    return groups if samples <= wanted.max_samples and (len(groups) == 1 or tokens <= wanted.max_tokens) else []


def answer_pending(transition: Transition, holds_back: Callable[[Transition, BatchRequest], bool]) -> None:
    """Answers every waiting BatchRequest that can be answered and is not held back, oldest first."""
    state = transition.state
    for pending in tuple(state.pending.values()):
        wanted, packing = pending.request, pack(state, pending.request)
        if packing is None or (packing.groups and holds_back(transition, wanted)):
            continue
        if not packing.groups and not packing.last:
            _close(transition, wanted, Declined(wanted.request, _too_large(state, wanted)))
            continue
        number, groups, last = state.next_batch, packing.groups, packing.last
        transition.record(BatchPacked(number, wanted, groups=groups, last=last, at=transition.now))
        if groups:
            _send_batch(transition, number, wanted, packing)
        else:
            _answer_empty(transition, wanted, Batch(wanted.request, number, step=wanted.step, samples=(), last=last))


def close_late(transition: Transition) -> None:
    """Answers Late to every BatchRequest whose deadline has passed."""
    for pending in tuple(transition.state.pending.values()):
        if pending.due <= transition.now:
            wanted = pending.request
            whom = awaited(transition.state, wanted.step, purpose=wanted.purpose, now=transition.now)
            _close(transition, wanted, Late(wanted.request, whom))


def answer_again(transition: Transition, wanted: BatchRequest) -> bool:
    """Repeats the answer to a request that was answered before; False if it was not, or was forgotten since."""
    for number, batch in transition.state.batches.items():
        before = batch.request
        if (before.request, before.step, before.purpose) == (wanted.request, wanted.step, wanted.purpose):
            _send_batch(transition, number, before, Packing(batch.groups, batch.last))
            return True
    key, kept = digest_of(wanted), transition.state.answered.get(wanted.request, b"")
    if kept.startswith(key):
        transition.answer(wire.decode_to_trainer(kept[len(key) :]))
    return kept.startswith(key)


def digest_of(message: wire.FromTrainer) -> bytes:
    """Differs between a repeated request and another one under the same number."""
    return hashlib.blake2b(wire.encode(message), digest_size=DIGEST_BYTES).digest()


def _send_batch(transition: Transition, number: int, wanted: BatchRequest, packing: Packing) -> None:
    """Sends a packed batch; its samples stay here until they are acknowledged, so it can be sent again."""
    samples, checks = [], []
    for group in packing.groups:
        for scored, check in scored_group(transition.state, group):
            samples.append(scored)
            checks.append(check)
    transition.answer(
        Batch(wanted.request, number, step=wanted.step, samples=tuple(samples), last=packing.last, checks=tuple(checks))
    )


def _close(transition: Transition, wanted: BatchRequest, answer: Declined | Late) -> None:
    transition.record(BatchRequestClosed(wanted.request))
    _answer_empty(transition, wanted, answer)


def _answer_empty(transition: Transition, wanted: BatchRequest, answer: Declined | Late | Batch) -> None:
    transition.record(RequestDone(wanted.request, digest_of(wanted) + wire.encode(answer)))
    transition.answer(answer)


def _too_large(state: LedgerState, wanted: BatchRequest) -> str:
    number = state.steps[step_key(wanted.step, wanted.purpose)].ready[0]
    size = state.groups[number].group.n
    return f"maxSamples {wanted.max_samples} is less than the {size} samples of group {number}, which cannot be split"
