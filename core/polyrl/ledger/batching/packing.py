"""Which complete groups answer a batch request: whole groups in order of completion, up to the limits, at least the
minimum unless nothing more can come.

An answer without samples (late, refused, nothing left) is remembered for as long as a repeated request may ask for it:
the trainer takes the first answer to a request, so a second one with samples would be trained by nobody.

The order is never bent: a group that does not fit ends the batch, even if a later one would fit. So batches depend on
the order of completion alone, and a large group cannot be overtaken for ever.
"""

from __future__ import annotations

from typing import NamedTuple

from polyrl.ledger.events import BatchPacked, BatchRequestClosed, RequestDone
from polyrl.ledger.responses import group_tokens, scored_group
from polyrl.ledger.state import LedgerState, step_key
from polyrl.ledger.status import awaited
from polyrl.ledger.transition import Transition
from polyrl.weights import digest
from polyrl.wire import Batch, BatchRequest, Declined, FromTrainer, Late, decode_to_trainer, encode


class Packing(NamedTuple):
    """The answer to a BatchRequest."""

    groups: list[int]
    last: bool
    """Nothing else of this step and purpose is open or unpacked."""


def pack(state: LedgerState, request: BatchRequest) -> Packing | None:
    """The answer as far as the state allows one; None while the trainer must wait."""
    step = state.steps.get(step_key(request.step, request.purpose))
    if step is None:
        return Packing([], True)
    groups: list[int] = []
    samples = tokens = 0
    full = False
    for number in step.ready:
        size, weight = state.groups[number].group.n, group_tokens(state, number)
        if samples + size > request.max_samples or (groups and tokens + weight > request.max_tokens):
            full = True
            break
        groups.append(number)
        samples += size
        tokens += weight
    exhausted = not step.open
    enough = groups and samples >= min(request.min_samples, request.max_samples)
    if enough or full or exhausted:
        return Packing(groups, exhausted and len(groups) == len(step.ready))
    return None


def answer_pending(transition: Transition) -> None:
    """Answers every waiting BatchRequest that can be answered, oldest first."""
    state = transition.state
    for pending in tuple(state.pending.values()):
        request, packing = pending.request, pack(state, pending.request)
        if packing is None:
            continue
        if not packing.groups and not packing.last:
            _close(transition, request, Declined(request.request, _too_large(state, request)))
            continue
        number, groups, last = state.next_batch, packing.groups, packing.last
        transition.record(BatchPacked(number, request, groups=groups, last=last, at=transition.now))
        if groups:
            _send_batch(transition, number, request, packing)
        else:
            _answer_empty(transition, request, Batch(request.request, number, step=request.step, samples=(), last=last))


def close_late(transition: Transition) -> None:
    """Answers Late to every BatchRequest whose deadline has passed."""
    for pending in tuple(transition.state.pending.values()):
        if pending.due <= transition.now:
            request = pending.request
            whom = awaited(transition.state, request.step, purpose=request.purpose, now=transition.now)
            _close(transition, request, Late(request.request, whom))


def answer_again(transition: Transition, request: BatchRequest) -> bool:
    """Repeats the answer to a request that was answered before; False if it was not, or was forgotten since."""
    for number, batch in transition.state.batches.items():
        same = (batch.request.request, batch.request.step, batch.request.purpose)
        if same == (request.request, request.step, request.purpose):
            _send_batch(transition, number, batch.request, Packing(batch.groups, batch.last))
            return True
    key, kept = digest_of(request), transition.state.answered.get(request.request, b"")
    if kept.startswith(key):
        transition.answer(decode_to_trainer(kept[len(key) :]))
    return kept.startswith(key)


def digest_of(message: FromTrainer) -> bytes:
    """Differs between a repeated request and another one under the same number."""
    return digest(encode(message))


def _send_batch(transition: Transition, number: int, request: BatchRequest, packing: Packing) -> None:
    """Sends a packed batch; its samples stay here until they are acknowledged, so it can be sent again."""
    samples = tuple(scored for group in packing.groups for scored in scored_group(transition.state, group))
    transition.answer(Batch(request.request, number, step=request.step, samples=samples, last=packing.last))


def _close(transition: Transition, request: BatchRequest, answer: Declined | Late) -> None:
    transition.record(BatchRequestClosed(request.request))
    _answer_empty(transition, request, answer)


def _answer_empty(transition: Transition, request: BatchRequest, answer: Declined | Late | Batch) -> None:
    transition.record(RequestDone(request.request, digest_of(request) + encode(answer)))
    transition.answer(answer)


def _too_large(state: LedgerState, request: BatchRequest) -> str:
    number = state.steps[step_key(request.step, request.purpose)].ready[0]
    size = state.groups[number].group.n
    return f"maxSamples {request.max_samples} is less than the {size} samples of group {number}, which cannot be split"
