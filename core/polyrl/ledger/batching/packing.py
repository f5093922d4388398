"""Which complete groups answer a Next: whole groups in order of completion, up to the limits, at least the minimum
unless nothing more can come.

An answer without samples (late, refused, nothing left) is remembered for as long as a repeated request may ask for it:
the trainer takes the first answer to a request, so a second one with samples would be trained by nobody.

The order is never bent: a group that does not fit ends the batch, even if a later one would fit. So batches depend on
the order of completion alone, and a large group cannot be overtaken for ever.

Refuses to hold: mini-batch boundaries (the trainer asks for at most what is missing to one).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from polyrl.ledger.decision import Decision
from polyrl.ledger.events import BatchPacked, NextClosed, RequestDone
from polyrl.ledger.responses import group_tokens, scored_group
from polyrl.ledger.state import State, step_key
from polyrl.ledger.status import awaited
from polyrl.wire import Batch, FromTrainer, Late, Next, Refused, decode_to_trainer, encode


class Packing(NamedTuple):
    """The answer to a Next."""

    groups: list[int]
    last: bool
    """Nothing else of this step and purpose is open or unpacked."""


def pack(state: State, request: Next) -> Packing | None:
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


def answer_pending(d: Decision) -> None:
    """Answers every waiting Next that can be answered, oldest first."""
    for pending in tuple(d.state.pending.values()):
        request = pending.request
        packing = pack(d.state, request)
        if packing is None:
            continue
        if not packing.groups and not packing.last:
            d.record(NextClosed(request.request))
            _answer_empty(d, request, Refused(request.request, _too_large(d.state, request)))
            continue
        batch = d.state.next_batch
        d.record(BatchPacked(batch, request, packing.groups, packing.last, d.now))
        if packing.groups:
            send_batch(d, batch, request, packing)
        else:
            _answer_empty(d, request, Batch(request.request, batch, request.step, (), packing.last))


def send_batch(d: Decision, batch: int, request: Next, packing: Packing) -> None:
    """Sends a packed batch; its samples stay here until they are acknowledged, so it can be sent again."""
    samples = tuple(scored for number in packing.groups for scored in scored_group(d.state, number))
    d.answer(Batch(request.request, batch, request.step, samples, packing.last))


def close_late(d: Decision) -> None:
    """Answers Late to every Next whose deadline has passed."""
    for pending in tuple(d.state.pending.values()):
        if pending.due <= d.now:
            request = pending.request
            d.record(NextClosed(request.request))
            _answer_empty(d, request, Late(request.request, awaited(d.state, request.step, request.purpose, d.now)))


def answer_again(d: Decision, request: Next) -> bool:
    """Repeats the answer to a request that was answered before; False if it was not, or was forgotten since."""
    for number, batch in d.state.batches.items():
        same = (batch.request.request, batch.request.step, batch.request.purpose)
        if same == (request.request, request.step, request.purpose):
            send_batch(d, number, batch.request, Packing(batch.groups, batch.last))
            return True
    digest, kept = digest_of(request), d.state.answered.get(request.request, b"")
    if kept.startswith(digest):
        d.answer(decode_to_trainer(kept[len(digest) :]))
    return kept.startswith(digest)


def digest_of(message: FromTrainer) -> bytes:
    """Tells a repeated request from another under the same number."""
    return hashlib.blake2b(encode(message), digest_size=16).digest()


def _answer_empty(d: Decision, request: Next, answer: Refused | Late | Batch) -> None:
    d.record(RequestDone(request.request, digest_of(request) + encode(answer)))
    d.answer(answer)


def _too_large(state: State, request: Next) -> str:
    number = state.steps[step_key(request.step, request.purpose)].ready[0]
    size = state.groups[number].group.n
    return f"maxSamples {request.max_samples} is less than the {size} samples of group {number}, which cannot be split"
