"""What must hold of a run with kills; each promise that does not is a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from batches import Client
from journal import Journal
from plan import SAMPLES_PER_GROUP
from reference import Reference

from polyrl.ledger.scheduling.leases import TICK_RESOLUTION_S
from polyrl.sample import sample_id
from polyrl_cli.inspection.check import audit_journal

TOLERANCE: Final = 2e-4
"""Of a logprob in float32, over different orders of summation; as in the engines' conformance suite."""

LATE_S: Final = 0.5
"""What a deadline may be late on a machine whose cores are busy."""


class Wait(msgspec.Struct, frozen=True):
    """The longest wait of a kind, and until when it may last; seconds."""

    what: str
    seconds: float
    deadline: float


def waits(longest_to_move: float, journal: Journal, client: Client) -> list[Wait]:
    """Each kind of wait that a kill can lengthen."""
    lease_s = journal.config.gone_s + TICK_RESOLUTION_S + LATE_S
    progress_s = journal.config.progress_deadline_s + lease_s
    silence = round(max(journal.longest_silences()), 3)
    return [
        Wait("from a kill to the move of its samples", longest_to_move, lease_s),
        Wait("of a sample for its next token", silence, progress_s),
        Wait("of the trainer for a batch", round(client.longest_next, 3), client.next_deadline_s),
    ]


def broken(
    run: Path, journal: Journal, client: Client, differences: list[float | None], reference: Reference
) -> Iterable[str]:
    """A sentence for each."""
    yield from ends_wrong(journal, client, SAMPLES_PER_GROUP)
    yield from samples_wrong(client, differences, reference)
    for verdict in audit_journal(run / "journal.sqlite"):
        if verdict.broken:
            yield f"{verdict.invariant} ({verdict.title}) is broken {verdict.broken} times, first {verdict.first}"


def ends_wrong(journal: Journal, client: Client, in_group: int) -> Iterable[str]:
    """Every submitted sample ends once, for the manager and for the trainer, and in the same way."""
    submitted = Counter(sample_id(group, index) for group in client.groups for index in range(in_group))
    if submitted != Counter(sample for sample, _ in journal.ends):
        yield "the manager did not end every submitted sample exactly once"
    dropped = Counter(sample_id(notice["group"], index) for notice in client.dropped for index in range(in_group))
    given = Counter(sample["sample"] for sample in client.samples)
    if submitted != given + dropped:
        yield "the trainer did not get every submitted sample exactly once"
    if given != Counter(sample for sample, kind in journal.ends if kind == "acknowledged"):
        yield "what the manager calls acknowledged is not what the trainer was given"
    if any(not notice["reason"] for notice in client.dropped):
        yield "a group was dropped without a reason"


def difference(sample: dict[str, Any], reference: Reference) -> float | None:
    """Largest difference of a logprob from undisturbed decoding; None when a token id differs."""
    number = int(sample["sample"].partition(".")[0]) % len(reference.prompts)
    if sample["ids"] != reference.ids[number]:
        return None
    return float(max(abs(a - b) for a, b in zip(sample["logprobs"], reference.logprobs[number], strict=True)))


def samples_wrong(client: Client, differences: list[float | None], reference: Reference) -> Iterable[str]:
    """Each response is what undisturbed decoding gives, and its spans cover it exactly."""
    length = len(reference.ids[0])
    for sample, worst in zip(client.samples, differences, strict=True):
        if worst is None:
            yield f"sample {sample['sample']}: its tokens are not those of undisturbed greedy decoding"
        elif worst > TOLERANCE:
            yield f"sample {sample['sample']}: a logprob is {worst:.2g} off"
        bounds = [0, *(end for _, end, *_ in sample["spans"])]
        if [begin for begin, *_ in sample["spans"]] != bounds[:-1] or bounds[-1] != length:
            yield f"sample {sample['sample']}: its spans {sample['spans']} do not cover 0 to {length}"
        attempts = [attempt for *_, attempt in sample["spans"]]
        if attempts != sorted(set(attempts)) or {span[2] for span in sample["spans"]} != {0}:
            yield f"sample {sample['sample']}: its spans {sample['spans']} name wrong attempts or versions"
