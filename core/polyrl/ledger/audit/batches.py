"""Batches and deadlines in an audit's books: what answers a request, when, and what is trained. Part of `audit`.

Refuses to hold: tokens. Read next: `audit`.
"""

from __future__ import annotations

from math import inf

from polyrl.ledger.audit import records as r
from polyrl.ledger.audit.engines import LATE_TICK, TICK_S, EngineBooks
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.audit.samples import Place, SampleBooks
from polyrl.sample import Purpose

Step = tuple[int, Purpose]


class BatchBooks:
    """All batches; checks I2, I3, I5."""

    def __init__(self, findings: Findings, engines: EngineBooks, samples: SampleBooks) -> None:
        self._findings = findings
        self._engines = engines
        self._samples = samples
        self._unpacked: dict[Step, set[int]] = {}
        """Live groups in no batch."""
        self.unacknowledged: dict[int, list[int]] = {}
        self.last_batch = -1
        self._renewed_at: list[float] = []
        self._late: list[tuple[float, float, int]] = []

    def submitted(self, record: r.Submitted) -> None:
        self._unpacked.setdefault((record.step, record.purpose), set()).add(record.group)

    def completed(self, record: r.Completed) -> None:
        self._findings.saw("I2", "groups")
        group = self._samples.live.get(record.group)
        if group is None:
            self._findings.broke("I1", record.at, f"group {record.group} is complete, but it is not live")
            return
        open_ones = [index for index, sample in enumerate(group.samples) if sample.place is not Place.SCORED]
        if open_ones:
            text = f"group {record.group} is called complete without a verdict on its samples {open_ones[:3]}"
            self._findings.broke("I2", record.at, text)
        group.complete = True

    def discarded(self, record: r.Discarded) -> None:
        """To be told before the samples' books, which forget the group."""
        group = self._samples.live.get(record.group)
        if group is None:
            return
        self._unpacked[(group.submitted.step, group.submitted.purpose)].discard(record.group)
        batch = self.unacknowledged.get(group.batch, [])
        if record.group in batch:
            batch.remove(record.group)
            if not batch:
                del self.unacknowledged[group.batch]

    def batched(self, record: r.Batched) -> None:
        self._findings.saw("I2", "batches")
        self._answered(record.at, record.request, record.asked_at, record.due)
        if record.batch <= self.last_batch:
            self._findings.broke("I2", record.at, f"batch {record.batch} names two batches")
        self.last_batch = max(self.last_batch, record.batch)
        sizes = [self._pack(record, number) for number in record.groups]
        if record.groups:
            self.unacknowledged[record.batch] = list(record.groups)
        self._check_size(record, sum(sizes))

    def _pack(self, record: r.Batched, number: int) -> int:
        group = self._samples.live.get(number)
        if group is None:
            self._findings.broke("I2", record.at, f"batch {record.batch} holds group {number}, which is not live")
            return 0
        step, purpose = group.submitted.step, group.submitted.purpose
        if (step, purpose) != (record.step, record.purpose):
            text = f"batch {record.batch} of step {record.step} ({record.purpose}) holds group {number} of {step}"
            self._findings.broke("I2", record.at, f"{text} ({purpose})")
        if not group.complete:
            self._findings.broke("I2", record.at, f"batch {record.batch} holds group {number}, which is not complete")
        if group.batch >= 0:
            self._findings.broke("I2", record.at, f"group {number} is in the batches {group.batch} and {record.batch}")
        group.batch = record.batch
        self._unpacked[(step, purpose)].discard(number)
        return group.submitted.n

    def _check_size(self, record: r.Batched, samples: int) -> None:
        left = self._unpacked.get((record.step, record.purpose), set())
        if samples > record.max_samples:
            text = f"batch {record.batch} holds {samples} samples; at most {record.max_samples} were asked for"
            self._findings.broke("I2", record.at, text)
        if record.last and left:
            text = f"batch {record.batch} is called the last of step {record.step}; group {min(left)} is left"
            self._findings.broke("I2", record.at, text)
        ready = any(self._samples.live[number].complete for number in left)
        if samples < record.min_samples and not record.last and not (record.groups and ready):
            text = f"batch {record.batch} holds {samples} samples; at least {record.min_samples} were asked for"
            self._findings.broke("I2", record.at, text)

    def acknowledged(self, record: r.Acknowledged) -> None:
        self._findings.saw("I3", "acknowledgements")
        groups = self.unacknowledged.pop(record.batch, None)
        if groups is None:
            past = record.batch <= self.last_batch
            text = "was acknowledged or cancelled before" if past else "was never packed"
            self._findings.broke("I3", record.at, f"batch {record.batch} is acknowledged, but it {text}")
            return
        for number in groups:
            group = self._samples.end(number, "acknowledged", record.at)
            if group is not None:
                self._samples.acknowledged += group.submitted.n

    def unpacked(self, record: r.Unpacked) -> None:
        groups = self.unacknowledged.pop(record.batch, None)
        if groups is None:
            self._findings.broke("I3", record.at, f"batch {record.batch} is offered again, but it is not out")
            return
        for number in groups:
            group = self._samples.live[number]
            group.batch = -1
            self._unpacked[(group.submitted.step, group.submitted.purpose)].add(number)

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def renewed(self, record: r.Renewed) -> None:
        self._renewed_at.append(record.at)

    def unanswered(self, record: r.Unanswered) -> None:
        self._answered(record.at, record.request, record.asked_at, record.due)

    def _answered(self, at: float, request: int, asked_at: float, due: float) -> None:
        self._findings.saw("I5", "requests")
        if due == inf or due < asked_at:
            self._findings.broke("I5", at, f"request {request} has no deadline")
        elif at > due + self._slack_s:
            self._late.append((at, due, request))

    def conclude(self) -> None:
        """Late answers are forgiven where the manager itself was away: the renewal may stand just after the answer."""
        for at, due, request in self._late:
            nearest = min((abs(at - renewed) for renewed in self._renewed_at if renewed >= due), default=inf)
            if nearest > self._engines.config.lease_s:
                text = f"request {request} is answered {at - due:.3f} s after its deadline"
                self._findings.broke("I5", at, text)

    @property
    def _slack_s(self) -> float:
        return self._engines.config.lease_s * LATE_TICK + TICK_S
