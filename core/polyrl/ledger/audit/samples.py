"""Samples and groups as an audit sees them: where each is, what it has, how it ends (I1, I4, part of I6 and of I2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyrl.ledger import events as f
from polyrl.ledger.audit.engines import EngineAudit
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.audit.history import AssignmentTokens, Piece
from polyrl.ledger.state import SamplePhase
from polyrl.sample import Finish, Group, split_sample_id


@dataclass
class AuditedSample:
    """One live sample."""

    phase: SamplePhase = SamplePhase.WAITING
    assignment: int = 0
    """0: none."""
    length: int = 0
    """Response positions that the history shows; those of a running assignment come when it ends."""
    generated: int = 0


@dataclass
class AuditedGroup:
    """One live group."""

    submitted: Group
    """Without its prompt."""
    prompt_tokens: int
    seen: dict[int, AuditedSample] = field(default_factory=dict)
    """Samples that something happened to, by index: a history may claim any number of samples in a few bytes."""
    complete: bool = False
    batch: int = -1

    @property
    def budget(self) -> int:
        """Tokens that engines may generate for each sample."""
        return self.submitted.sampling.max_new_tokens

    @property
    def versions(self) -> str:
        """Weight versions that may generate for the group, for people."""
        return f"{self.submitted.min_version} to {self.submitted.max_version}"

    def sample(self, index: int) -> AuditedSample:
        """One of them, 0 <= `index` < n."""
        return self.seen.setdefault(index, AuditedSample())

    def without_verdict(self) -> Iterator[int]:
        """Indices of those that are not scored. To be read as far as is needed: there may be any number."""
        for index in range(self.submitted.n):
            if index not in self.seen or self.seen[index].phase is not SamplePhase.SCORED:
                yield index

    @property
    def tokens_left(self) -> int:
        """Tokens that engines may still generate for those without a verdict."""
        unscored = (sample for sample in self.seen.values() if sample.phase is not SamplePhase.SCORED)
        left = sum(self.budget - sample.generated for sample in unscored)
        return self.budget * (self.submitted.n - len(self.seen)) + left

    def allows(self, version: int) -> bool:
        """Whether `version` may generate for it."""
        return self.submitted.min_version <= version <= self.submitted.max_version


@dataclass
class SampleTotals:
    """Sums over a run."""

    submitted: int = 0
    acknowledged: int = 0
    discarded: int = 0
    tokens: int = 0


class SampleAudit:
    """All samples."""

    def __init__(self, findings: Findings, engines: EngineAudit) -> None:
        self._findings = findings
        self._engines = engines
        self.live: dict[int, AuditedGroup] = {}
        self.running: dict[int, f.Assigned] = {}
        self.ends: dict[int, str] = {}
        """How each group that is no longer live ended."""
        self.totals = SampleTotals()
        self.last_assignment = 0

    def submitted(self, event: f.GroupSubmitted, prompt_tokens: int, at: float) -> None:
        group = event.group
        self._findings.saw("I1", "samples", group.n)
        if group.id in self.live or group.id in self.ends:
            self._findings.broke("I1", at, f"group {group.id} is submitted twice")
            return
        self.totals.submitted += group.n
        self.live[group.id] = AuditedGroup(group, prompt_tokens)

    def assigned(self, event: f.Assigned, at: float) -> None:
        self._findings.saw("I4", "assignments")
        if event.assignment <= self.last_assignment:
            self._findings.broke("I4", at, f"assignment {event.assignment} names two assignments")
        self.last_assignment = max(self.last_assignment, event.assignment)
        found = self._find_in(SamplePhase.WAITING, event.sample, "is assigned", "I4", at)
        if found is None:
            return
        group, sample = found
        version = self._engines.version_of(event.engine)
        if not group.allows(version):
            text = f"{event.sample} goes to {event.engine}, which serves version {version}"
            self._findings.broke("I6", at, f"{text}; it may use {group.versions}")
        sample.phase, sample.assignment = SamplePhase.ASSIGNED, event.assignment
        self.running[event.assignment] = event

    def reclaimed(self, event: f.Assigned, length: int, at: float) -> None:
        """An assignment that had ended goes on from response position `length`; to be called after `end_assignment`."""
        self._findings.saw("I4", "assignments")
        if event.assignment > self.last_assignment or event.assignment in self.running:
            self._findings.broke("I4", at, f"assignment {event.assignment} is taken back, and was not left")
        found = self._find_in(SamplePhase.WAITING, event.sample, "is taken back", "I4", at)
        if found is None:
            return
        _, sample = found
        if length > sample.length:
            text = f"{event.sample} has {sample.length} tokens, and goes on from {length} on {event.engine}"
            self._findings.broke("I4", at, text)
        dropped = sample.length - length
        self.totals.tokens -= dropped
        sample.generated -= dropped
        sample.length = length
        sample.phase, sample.assignment = SamplePhase.ASSIGNED, event.assignment
        self.running[event.assignment] = event

    def tokens(self, event: AssignmentTokens, at: float) -> None:
        """What an assignment brought, just before it ends."""
        assigned = self.running.get(event.assignment)
        if assigned is None:
            count = sum(end - start for start, end, _ in event.pieces)
            text = f"{count} tokens are taken for assignment {event.assignment}, which does not run"
            self._findings.broke("I4", at, text)
        else:
            self.check_pieces(assigned.sample, assigned.engine, event.pieces, at)

    def turn_ended(self, event: f.TurnEnded, at: float) -> None:
        """To be called after `end_assignment`, which leaves a sample that ran waiting."""
        self._findings.saw("I4", "turns")
        found = self._find(event.sample, "ends a turn", at)
        if found is None:
            return
        group, sample = found
        if sample.phase is not SamplePhase.WAITING:
            self._findings.broke("I4", at, f"the turn of {event.sample} ends while it is {sample.phase}")
        sample.phase = SamplePhase.TURN_DONE
        used = group.prompt_tokens + sample.length
        has_room = self._engines.has_room(used, group.submitted.max_version)
        if event.finish is Finish.LENGTH and sample.generated < group.budget and has_room:
            text = f"{event.sample} ends for length after {sample.generated} of {group.budget} tokens"
            self._findings.broke("I4", at, f"{text}, and engines have room for more than its {used}")

    def extended(self, event: f.TurnExtended, tokens: int, at: float) -> None:
        found = self._find_in(SamplePhase.TURN_DONE, event.sample, "is extended", "I4", at)
        if found is not None:
            found[1].phase = SamplePhase.WAITING
            found[1].length += tokens

    def scored(self, event: f.SampleScored, at: float) -> None:
        found = self._find_in(SamplePhase.TURN_DONE, event.sample, "is scored", "I2", at)
        if found is not None:
            found[1].phase = SamplePhase.SCORED

    def end(self, number: int, how: str, at: float) -> AuditedGroup | None:
        """A group ends; None, and I1 is broken, when it is not live."""
        group = self.live.pop(number, None)
        if group is None:
            self._findings.broke("I1", at, f"group {number} is {how}, but it {self._fate(number)}")
        self.ends.setdefault(number, how)
        return group

    def running_of(self, number: int) -> list[int]:
        """Assignments of a live group that run."""
        group = self.live.get(number)
        return [] if group is None else [sample.assignment for sample in group.seen.values() if sample.assignment]

    def assignment_of(self, name: str) -> int:
        """The one that runs for a sample; 0: none."""
        found = self.find(name)
        return 0 if found is None else found[1].assignment

    def end_assignment(self, number: int, at: float) -> f.Assigned | None:
        """It is over, and its sample waits; None, and I4 is broken, when it does not run."""
        assigned = self.running.pop(number, None)
        found = None if assigned is None else self._find(assigned.sample, "leaves an engine", at)
        if found is None or found[1].assignment != number:
            self._findings.broke("I4", at, f"assignment {number} ends, but it does not run")
        else:
            found[1].phase, found[1].assignment = SamplePhase.WAITING, 0
        return assigned

    def check_pieces(self, name: str, engine: str, pieces: list[Piece], at: float) -> None:
        """The tokens that one assignment brought follow what the sample has, within its budget, of allowed versions."""
        found = self.find(name)
        if found is None:
            return
        group, sample = found
        for start, end, version in pieces:
            self._findings.saw("I6", "pieces")
            self._findings.saw("I4", "tokens", end - start)
            if start != sample.length or end <= start:
                text = f"{name} has {sample.length} tokens, and {start} to {end} come from {engine}"
                self._findings.broke("I4", at, text)
            sample.length = max(end, sample.length)
            sample.generated += end - start
            self.totals.tokens += end - start
            self._check_version(name, group, engine, version, at)
        if sample.generated > group.budget:
            self._findings.broke("I4", at, f"{name} has {sample.generated} generated tokens of {group.budget}")

    def _check_version(self, name: str, group: AuditedGroup, engine: str, version: int, at: float) -> None:
        text = f"{name} has tokens of version {version} from {engine}"
        if not group.allows(version):
            self._findings.broke("I6", at, f"{text}; it may use {group.versions}")
        elif not self._engines.has_verified(engine, version):
            self._findings.broke("I6", at, f"{text}, which had not verified it")

    def find(self, name: str) -> tuple[AuditedGroup, AuditedSample] | None:
        """A live sample and its group."""
        try:
            number, index = split_sample_id(name)
        except ValueError:
            return None
        group = self.live.get(number)
        return None if group is None or not 0 <= index < group.submitted.n else (group, group.sample(index))

    def _find(self, name: str, what: str, at: float) -> tuple[AuditedGroup, AuditedSample] | None:
        found = self.find(name)
        if found is None:
            fate = self._fate(_group_of(name))
            self._findings.broke("I1", at, f"{name or 'a sample'} {what}, but it {fate}")
        return found

    def _find_in(
        self, phase: SamplePhase, name: str, what: str, invariant: str, at: float
    ) -> tuple[AuditedGroup, AuditedSample] | None:
        """`_find`; `invariant` is broken when the sample is not in `phase`."""
        found = self._find(name, what, at)
        if found is not None and found[1].phase is not phase:
            self._findings.broke(invariant, at, f"{name} {what} while it is {found[1].phase}")
        return found

    def _fate(self, group: int) -> str:
        before = self.ends.get(group)
        return "was never submitted" if before is None else f"was {before} before"


def _group_of(name: str) -> int:
    """-1 where the name is no sample's, or has more digits than Python reads."""
    try:
        return split_sample_id(name)[0]
    except ValueError:
        return -1
