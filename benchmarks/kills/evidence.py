"""What the kills did, read from the manager's journal, the trainer's batches and the engines' counters, afterwards.

The journal says when each token was accepted, of which assignment, and when and why an assignment was moved: the times
are the manager's own. Each promise that does not hold is a sentence in `violations`.

Refuses to hold: processes. Read next: `run`.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
from reference import Reference

from polyrl.ledger import LedgerConfig
from polyrl.ledger import journal_format as form
from polyrl.ledger.codec import decode_facts
from polyrl.ledger.columns import row_columns
from polyrl.ledger.facts import (
    Assigned,
    BatchAcknowledged,
    BatchPacked,
    Fact,
    GroupDiscarded,
    GroupSubmitted,
    Moved,
    TokensTaken,
    TurnEnded,
)
from polyrl.ledger.leases import TICK_RESOLUTION_S
from polyrl.ledger.records import RUN, Began, decode_record
from polyrl.sample import sample_id

TOLERANCE: Final = 2e-4
"""Of a logprob in float32, over different orders of summation; as in the engines' conformance suite."""

MIN_KEPT: Final = 0.99
"""Share of generated tokens that must survive."""

LATE_S: Final = 0.5
"""What a deadline may be late on a machine whose cores are busy."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL."""

    victim: str
    wall: float
    """Unix seconds."""


@dataclass(frozen=True)
class Aftermath:
    """What one kill did to the samples that its victim ran; seconds since the kill."""

    detected: list[float]
    """Per sample: taken from the victim."""
    flowing: list[float]
    """Per sample: its next token accepted, from another engine."""


class Journal:
    """A finished run's journal. Raises ValueError when a snapshot has replaced the facts: take fewer kills."""

    def __init__(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as db:
            (snapshot, *_) = db.execute(form.SELECT_SNAPSHOT).fetchone()
            rows = db.execute(form.SELECT_FACTS).fetchall()
            ((first,),) = db.execute(f"{form.SELECT_RECORDS_ABOUT} LIMIT 1", (RUN,)).fetchall()
        if snapshot:
            raise ValueError(f"{path}: facts up to {snapshot} are gone")
        began = decode_record(first)
        assert isinstance(began, Began), "a journal opens with the beginning of its run"
        self.config = began.config
        self._ahead = began.wall - began.at
        self._samples: dict[int, str] = {}
        self._engines: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._batches: dict[int, list[int]] = {}
        self.ends: list[tuple[str, str]] = []
        """(sample, `acknowledged` or `discarded`)"""
        self.moved: dict[int, Moved] = {}
        self.tokens: dict[str, list[tuple[float, int]]] = {}
        """Per sample: when tokens were accepted, and of which assignment."""
        self.seen: dict[str, list[float]] = {}
        """Per sample: when it was first placed, got tokens, ended its turn."""
        self.taken: list[TokensTaken] = []
        self.accepted: Counter[str] = Counter()
        """Tokens per engine."""
        for _, _, body, _ in rows:
            for fact in decode_facts(body):
                self._read(fact)

    def clock(self, wall: float) -> float:
        """The manager's clock at a Unix time."""
        return wall - self._ahead

    def aftermath(self, kill: Kill) -> Aftermath:
        """Of the samples that were moved from the victim; those whose last tokens were on their way needed no move."""
        at = self.clock(kill.wall)
        lost = [n for n, moved in self.moved.items() if self._engines[n] == kill.victim and moved.at >= at]
        flowing = (self._next_token(number) for number in lost)
        return Aftermath([self.moved[n].at - at for n in lost], [when - at for when in flowing if when is not None])

    def longest_silences(self) -> Iterable[float]:
        """Per sample: its longest time between two accepted tokens, from its first placement to the end of its turn."""
        return (max(later - earlier for earlier, later in pairwise(times)) for times in self.seen.values())

    def _next_token(self, number: int) -> float | None:
        """When the sample of an assignment that was moved got its first token by a later one."""
        tokens = self.tokens.get(self._samples[number], [])
        return next((at for at, later in tokens if later > number), None)

    def _read(self, fact: Fact) -> None:
        match fact:
            case GroupSubmitted():
                self._sizes[fact.group.group] = fact.group.n
            case Assigned():
                self._samples[fact.assignment], self._engines[fact.assignment] = fact.sample, fact.engine
                self.seen.setdefault(fact.sample, [fact.at])
            case Moved():
                self.moved[fact.assignment] = fact
            case TurnEnded():
                self.seen[fact.sample].append(fact.at)
            case TokensTaken():
                self._read_tokens(fact)
            case BatchPacked():
                self._batches[fact.batch] = fact.groups
            case BatchAcknowledged():
                self.ends += [
                    (name, "acknowledged") for group in self._batches[fact.batch] for name in self._members(group)
                ]
            case GroupDiscarded():
                self.ends += [(name, "discarded") for name in self._members(fact.group)]

    def _members(self, group: int) -> list[str]:
        return [sample_id(group, index) for index in range(self._sizes[group])]

    def _read_tokens(self, fact: TokensTaken) -> None:
        self.taken.append(fact)
        self.accepted[fact.engine] += len(fact.ids) // 4
        numbers, _, counts, _ = row_columns(fact.rows)
        for number, count in zip(numbers, counts, strict=True):
            if count:
                name = self._samples[number]
                self.tokens.setdefault(name, []).append((fact.at, number))
                self.seen[name].append(fact.at)


class Report(msgspec.Struct, rename="camel", kw_only=True):
    """What `run` prints; seconds unless said otherwise."""

    seed: int
    told: bool
    """The runner tells the manager that a process has ended; else only the lease does."""
    kills: int
    wall_seconds: float
    samples: dict[str, int]
    tokens: dict[str, int]
    kept_share: float
    bytes_per_token: float
    moved: dict[str, int]
    """Samples by the cause of the move."""
    moved_by_kill: dict[str, float]
    lost_by_kill: dict[str, float]
    """Tokens that the victim's agent had from its engine and the manager never took."""
    kill_to_moved: dict[str, float]
    kill_to_first_tokens: dict[str, float]
    """Per kill: the first of its samples flows elsewhere."""
    kill_to_all_tokens: dict[str, float]
    """Per kill: the last of its samples flows elsewhere."""
    longest_silence: float
    """Of one sample, between two of its tokens."""
    longest_next: float
    logprob_difference: float
    violations: list[str]


class Client:
    """The trainer's own account: every batch it was given and every group it was told is dropped."""

    def __init__(self, run: Path) -> None:
        lines = (run / "batches.jsonl").read_bytes().splitlines()
        batches: list[dict[str, Any]] = [msgspec.json.decode(line) for line in lines]
        self.samples: list[dict[str, Any]] = [sample for batch in batches for sample in batch["samples"]]
        self.longest_next: float = max(batch["waitedSeconds"] for batch in batches)
        last: dict[str, Any] = msgspec.json.decode((run / "client.json").read_bytes())
        self.groups: list[int] = last["groups"]
        self.dropped: list[dict[str, Any]] = last["dropped"]
        self.next_deadline_s: float = last["nextDeadlineSeconds"]


def judge(
    run: Path, kills: list[Kill], reference: Reference, in_group: int, seed: int, told: bool, wall_seconds: float
) -> Report:
    """Reads a finished run's folder."""
    journal, client = Journal(run / "journal.sqlite"), Client(run)
    aftermaths = [journal.aftermath(kill) for kill in kills]
    counted = {file.name: int.from_bytes(file.read_bytes(), "little") for file in (run / "counters").iterdir()}
    generated, kept = sum(counted.values()), journal.accepted.total()
    refused = sum(fact.in_vain + fact.repeated for fact in journal.taken)
    flows = [aftermath.flowing for aftermath in aftermaths if aftermath.flowing]
    differences = [difference(sample, reference) for sample in client.samples]
    report = Report(
        seed=seed,
        told=told,
        kills=len(kills),
        wall_seconds=round(wall_seconds, 1),
        samples={"submitted": len(client.groups) * in_group, **Counter(kind for _, kind in journal.ends)},
        tokens={"generated": generated, "kept": kept, "refused": refused, "lost": generated - kept - refused},
        kept_share=round(kept / generated, 5),
        bytes_per_token=round(sum(fact.frame_bytes for fact in journal.taken) / kept, 2),
        moved=dict(Counter(moved.cause for moved in journal.moved.values())),
        moved_by_kill=quantiles([float(len(aftermath.detected)) for aftermath in aftermaths]),
        lost_by_kill=quantiles([float(counted[kill.victim] - journal.accepted[kill.victim]) for kill in kills]),
        kill_to_moved=quantiles([max(aftermath.detected) for aftermath in aftermaths if aftermath.detected]),
        kill_to_first_tokens=quantiles([min(flowing) for flowing in flows]),
        kill_to_all_tokens=quantiles([max(flowing) for flowing in flows]),
        longest_silence=round(max(journal.longest_silences()), 3),
        longest_next=round(client.longest_next, 3),
        logprob_difference=max((d for d in differences if d is not None), default=0.0),
        violations=[],
    )
    report.violations = [
        *ends_wrong(journal, client, in_group),
        *samples_wrong(client, differences, reference),
        *figures_wrong(report, client, journal.config),
    ]
    return report


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


def figures_wrong(report: Report, client: Client, config: LedgerConfig) -> Iterable[str]:
    """Tokens kept, and every wait within its stated deadline."""
    lease_s = config.lease_s + TICK_RESOLUTION_S + LATE_S
    limits = {
        "from a kill to the move of its samples": (report.kill_to_moved["max"], lease_s),
        "of a sample for its next token": (report.longest_silence, config.progress_deadline_s + lease_s),
        "of the trainer for a batch": (report.longest_next, client.next_deadline_s),
    }
    for what, (seconds, limit) in limits.items():
        if seconds > limit:
            yield f"the longest wait {what} was {seconds:.1f} s, its deadline {limit:.1f} s"
    if report.kept_share < MIN_KEPT:
        yield f"only {report.kept_share:.2%} of the generated tokens were kept"
    if report.tokens["lost"] < 0:
        yield "more tokens were accepted than engines generated"


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p95 (nearest rank) and max."""
    ranked = sorted(values) or [0.0]
    ranks = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: round(ranked[max(0, -int(-q * len(ranked) // 1) - 1)], 3) for name, q in ranks.items()}
