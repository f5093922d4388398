"""Samples and groups in an audit's books: where each is, what it has, how it ends. Part of `audit`.

Refuses to hold: batches (see `audit_batches`), engines (see `audit_engines`). Read next: `audit_batches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from polyrl.ledger.audit import records as r
from polyrl.ledger.audit.engines import EngineBooks
from polyrl.ledger.audit.findings import Findings
from polyrl.sample import Finish, split_sample_id


class Place(StrEnum):
    """Where a live sample is, as an audit sees it."""

    WAITING = "waiting"
    ASSIGNED = "assigned"
    TURN_DONE = "turnDone"
    SCORED = "scored"


@dataclass
class SampleBook:
    """One live sample."""

    place: Place = Place.WAITING
    assignment: int = 0
    length: int = 0
    """Response positions that are told of; those of a running assignment are not yet."""
    generated: int = 0


@dataclass
class GroupBook:
    """One live group."""

    submitted: r.Submitted
    samples: list[SampleBook]
    complete: bool = False
    batch: int = -1


class SampleBooks:
    """All samples; checks I1, I4, the sample's side of I6, and that what is scored was over (I2)."""

    def __init__(self, findings: Findings, engines: EngineBooks) -> None:
        self._findings = findings
        self._engines = engines
        self.live: dict[int, GroupBook] = {}
        self.ends: dict[int, str] = {}
        """How each group that is no longer live ended."""
        self.submitted = self.acknowledged = self.discarded = self.tokens = 0
        self.last_assignment = 0

    def submit(self, record: r.Submitted) -> None:
        self._findings.saw("I1", "samples", record.n)
        if record.group in self.live or record.group in self.ends:
            self._findings.broke("I1", record.at, f"group {record.group} is submitted twice")
            return
        self.submitted += record.n
        self.live[record.group] = GroupBook(record, [SampleBook() for _ in range(record.n)])

    def assign(self, record: r.Assigned) -> None:
        self._findings.saw("I4", "assignments")
        group, sample = self._find(record, "is assigned")
        if record.assignment <= self.last_assignment:
            self._findings.broke("I4", record.at, f"assignment {record.assignment} names two assignments")
        self.last_assignment = max(self.last_assignment, record.assignment)
        if group is None or sample is None:
            return
        if sample.place is not Place.WAITING:
            self._findings.broke("I4", record.at, f"{record.sample} is assigned while it is {sample.place}")
        if not _allowed(group, record.version):
            text = f"{record.sample} goes to {record.engine}, which serves version {record.version}"
            self._findings.broke("I6", record.at, f"{text}; it may use {_range(group)}")
        sample.place, sample.assignment = Place.ASSIGNED, record.assignment

    def move(self, record: r.Moved | r.Cut) -> None:
        sample = self._end_assignment(record)
        if sample is not None:
            sample.place = Place.WAITING

    def end_turn(self, record: r.TurnEnded) -> None:
        self._findings.saw("I4", "turns")
        if record.assignment:
            sample = self._end_assignment(record)
        else:
            _, sample = self._find(record, "ends a turn")
            if sample is not None and sample.place is not Place.WAITING:
                self._findings.broke("I4", record.at, f"the turn of {record.sample} ends while it is {sample.place}")
        if sample is None:
            return
        sample.place = Place.TURN_DONE
        budget = self.live[split_sample_id(record.sample)[0]].submitted.max_new_tokens
        if record.finish is Finish.LENGTH and sample.generated < budget:
            text = f"{record.sample} ends for length after {sample.generated} of {budget} tokens"
            self._findings.broke("I4", record.at, text)

    def extend(self, record: r.Extended) -> None:
        _, sample = self._find(record, "is extended")
        if sample is None:
            return
        if sample.place is not Place.TURN_DONE:
            self._findings.broke("I4", record.at, f"{record.sample} is extended while it is {sample.place}")
        sample.place = Place.WAITING
        sample.length += record.tokens

    def score(self, record: r.Scored) -> None:
        _, sample = self._find(record, "is scored")
        if sample is None:
            return
        if sample.place is not Place.TURN_DONE:
            self._findings.broke("I2", record.at, f"{record.sample} is scored while it is {sample.place}")
        sample.place = Place.SCORED

    def discard(self, record: r.Discarded) -> None:
        group = self.end(record.group, "discarded", record.at)
        if group is None:
            return
        self.discarded += group.submitted.n
        running = [index for index, sample in enumerate(group.samples) if sample.place is Place.ASSIGNED]
        if running:
            text = f"group {record.group} is discarded while its samples {running[:3]} run"
            self._findings.broke("I4", record.at, text)

    def end(self, number: int, how: str, at: float) -> GroupBook | None:
        """A group ends; None, and I1 is broken, when it is not live."""
        group = self.live.pop(number, None)
        if group is None:
            before = self.ends.get(number)
            text = "was never submitted" if before is None else f"was {before} before"
            self._findings.broke("I1", at, f"group {number} is {how}, but it {text}")
        self.ends.setdefault(number, how)
        return group

    def stray(self, record: r.Stray) -> None:
        text = f"{record.tokens} tokens are taken for assignment {record.assignment}, which does not run"
        self._findings.broke("I4", record.at, text)

    def check_pieces(self, name: str, engine: str, pieces: list[r.Piece], at: float) -> None:
        """The tokens that one assignment brought follow what the sample has, within its budget, of allowed versions."""
        group, sample = self._books_of(name)
        if group is None or sample is None:
            return
        for start, end, version in pieces:
            self._findings.saw("I6", "pieces")
            self._findings.saw("I4", "tokens", end - start)
            if start != sample.length or end <= start:
                text = f"{name} has {sample.length} tokens, and {start} to {end} come from {engine}"
                self._findings.broke("I4", at, text)
            sample.length = max(end, sample.length)
            sample.generated += end - start
            self.tokens += end - start
            self._check_version(name, group, engine, version, at)
        if sample.generated > group.submitted.max_new_tokens:
            text = f"{name} has {sample.generated} generated tokens of {group.submitted.max_new_tokens}"
            self._findings.broke("I4", at, text)

    def _check_version(self, name: str, group: GroupBook, engine: str, version: int, at: float) -> None:
        if not _allowed(group, version):
            text = f"{name} has tokens of version {version} from {engine}; it may use {_range(group)}"
            self._findings.broke("I6", at, text)
        elif not self._engines.verified(engine, version):
            text = f"{name} has tokens of version {version} from {engine}, which had not verified it"
            self._findings.broke("I6", at, text)

    def _end_assignment(self, record: r.OfAssignment) -> SampleBook | None:
        _, sample = self._find(record, "leaves an engine")
        if sample is None:
            return None
        if sample.assignment != record.assignment:
            text = f"assignment {record.assignment} of {record.sample} ends, but {sample.assignment or 'none'} runs"
            self._findings.broke("I4", record.at, text)
        self.check_pieces(record.sample, record.engine, record.pieces, record.at)
        sample.assignment = 0
        return sample

    def _find(
        self, record: r.Assigned | r.OfAssignment | r.Extended | r.Scored, what: str
    ) -> tuple[GroupBook | None, SampleBook | None]:
        group, sample = self._books_of(record.sample)
        if sample is None:
            before = self.ends.get(_group_of(record.sample))
            text = "was never submitted" if before is None else f"was {before} before"
            self._findings.broke("I1", record.at, f"{record.sample or 'a sample'} {what}, but it {text}")
        return group, sample

    def _books_of(self, name: str) -> tuple[GroupBook | None, SampleBook | None]:
        group = self.live.get(_group_of(name))
        if group is None:
            return None, None
        index = split_sample_id(name)[1]
        return group, group.samples[index] if 0 <= index < len(group.samples) else None


def _group_of(name: str) -> int:
    try:
        return split_sample_id(name)[0]
    except ValueError:
        return -1


def _allowed(group: GroupBook, version: int) -> bool:
    return group.submitted.min_version <= version <= group.submitted.max_version


def _range(group: GroupBook) -> str:
    return f"{group.submitted.min_version} to {group.submitted.max_version}"
