"""Batches and deadlines as an audit sees them: what answers a request, when, and what is trained (I2, I3, I5)."""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import Final

from polyrl.ledger import events as f
from polyrl.ledger.audit.engines import LATE_TICK, TICK_S, EngineAudit
from polyrl.ledger.audit.findings import Findings
from polyrl.ledger.audit.samples import SampleAudit
from polyrl.sample import Purpose

Step = tuple[int, Purpose]

NAMED: Final = 3
"""Samples without a verdict that a finding names."""


class BatchAudit:
    """All batches."""

    def __init__(self, findings: Findings, engines: EngineAudit, samples: SampleAudit) -> None:
        self._findings = findings
        self._engines = engines
        self._samples = samples
        self._unpacked: dict[Step, set[int]] = {}
        """Live groups in no batch."""
        self.unacknowledged: dict[int, list[int]] = {}
        self._kept: dict[int, list[int]] = {}
        """Acknowledged ones that no checkpoint contains."""
        self._trained_before: set[int] = set()
        """Groups that were acknowledged, and offered again to a trainer whose state does not contain them."""
        self.last_batch = -1
        self._requested: dict[int, tuple[float, float]] = {}
        """When each open request came, and its deadline."""
        self._renewed_at: list[float] = []
        self._late: list[tuple[float, float, int]] = []

    def submitted(self, event: f.GroupSubmitted) -> None:
        self._unpacked.setdefault((event.group.step, event.group.purpose), set()).add(event.group.id)

    def completed(self, event: f.GroupCompleted, at: float) -> None:
        self._findings.saw("I2", "groups")
        group = self._samples.live.get(event.group)
        if group is None:
            self._findings.broke("I1", at, f"group {event.group} is complete, but it is not live")
            return
        open_ones = list(islice(group.without_verdict(), NAMED))
        if open_ones:
            text = f"group {event.group} is called complete without a verdict on its samples {open_ones}"
            self._findings.broke("I2", at, text)
        group.complete = True

    def discarded(self, event: f.GroupDiscarded) -> None:
        """To be called before the samples' audit forgets the group."""
        group = self._samples.live.get(event.group)
        if group is None:
            return
        self._unpacked[(group.submitted.step, group.submitted.purpose)].discard(event.group)
        batch = self.unacknowledged.get(group.batch, [])
        if event.group in batch:
            batch.remove(event.group)
            if not batch:
                del self.unacknowledged[group.batch]

    def packed(self, event: f.BatchPacked, at: float) -> None:
        self._findings.saw("I2", "batches")
        self._answered(event.wanted.request, at)
        if event.batch <= self.last_batch:
            self._findings.broke("I2", at, f"batch {event.batch} names two batches")
        self.last_batch = max(self.last_batch, event.batch)
        sizes = [self._pack(event, number, at) for number in event.groups]
        if event.groups:
            self.unacknowledged[event.batch] = list(event.groups)
        self._check_size(event, sum(sizes), at)

    def _pack(self, event: f.BatchPacked, number: int, at: float) -> int:
        group = self._samples.live.get(number)
        if group is None:
            self._findings.broke("I2", at, f"batch {event.batch} holds group {number}, which is not live")
            return 0
        step, purpose = group.submitted.step, group.submitted.purpose
        if (step, purpose) != (event.wanted.step, event.wanted.purpose):
            text = f"batch {event.batch} of step {event.wanted.step} ({event.wanted.purpose}) holds group {number}"
            self._findings.broke("I2", at, f"{text} of {step} ({purpose})")
        if not group.complete:
            self._findings.broke("I2", at, f"batch {event.batch} holds group {number}, which is not complete")
        if group.batch >= 0:
            self._findings.broke("I2", at, f"group {number} is in the batches {group.batch} and {event.batch}")
        group.batch = event.batch
        self._unpacked[(step, purpose)].discard(number)
        return group.submitted.n

    def _check_size(self, event: f.BatchPacked, samples: int, at: float) -> None:
        wanted = event.wanted
        left = self._unpacked.get((wanted.step, wanted.purpose), set())
        if samples > wanted.max_samples:
            text = f"batch {event.batch} holds {samples} samples; at most {wanted.max_samples} were asked for"
            self._findings.broke("I3", at, text)
        if event.last and left:
            text = f"batch {event.batch} is called the last of step {wanted.step}; group {min(left)} is left"
            self._findings.broke("I2", at, text)
        ready = any(self._samples.live[number].complete for number in left)
        # What a trainer without it trained before is handed out in the same parts.
        again = all(number in self._trained_before for number in event.groups)
        least = min(wanted.min_samples, wanted.max_samples)
        if samples < least and not (event.last or again) and not (event.groups and ready):
            text = f"batch {event.batch} holds {samples} samples; at least {least} were asked for"
            self._findings.broke("I2", at, text)

    def acknowledged(self, event: f.BatchAcknowledged, at: float) -> None:
        self._findings.saw("I3", "acknowledgements")
        groups = self.unacknowledged.pop(event.batch, None)
        if groups is None:
            past = event.batch <= self.last_batch
            text = "was acknowledged or cancelled before" if past else "was never packed"
            self._findings.broke("I3", at, f"batch {event.batch} is acknowledged, but it {text}")
            return
        for number in groups:
            ends = self._samples.live.get(number) if event.kept else self._samples.end(number, "acknowledged", at)
            if ends is not None:
                self._samples.totals.acknowledged += ends.submitted.n
        if event.kept:
            self._kept[event.batch] = groups

    def released(self, event: f.BatchReleased, at: float) -> None:
        groups = self._kept.pop(event.batch, None)
        if groups is None:
            self._findings.broke("I3", at, f"batch {event.batch} is forgotten, but it is not kept")
        for number in groups or ():
            self._samples.end(number, "acknowledged", at)

    def returned(self, event: f.BatchReturned, at: float) -> None:
        kept = self._kept.pop(event.batch, None)
        groups = self.unacknowledged.pop(event.batch, kept)
        if groups is None:
            self._findings.broke("I3", at, f"batch {event.batch} is offered again, but it is not out")
            return
        for number in groups:
            group = self._samples.live[number]
            self._samples.totals.acknowledged -= group.submitted.n * (kept is not None)
            group.batch = -1
            if kept is not None:
                self._trained_before.add(number)
            self._unpacked[(group.submitted.step, group.submitted.purpose)].add(number)

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def requested(self, event: f.BatchRequested, at: float) -> None:
        self._requested[event.wanted.request] = (at, at + event.wanted.deadline_s)

    def closed(self, event: f.BatchRequestClosed, at: float) -> None:
        self._answered(event.request, at)

    def renewed(self, at: float) -> None:
        self._renewed_at.append(at)

    def _answered(self, request: int, at: float) -> None:
        self._findings.saw("I5", "requests")
        asked_at, due = self._requested.pop(request, (at, inf))
        if due == inf or due < asked_at:
            self._findings.broke("I5", at, f"request {request} has no deadline")
        elif at > due + self._engines.config.lease_s * LATE_TICK + TICK_S:
            self._late.append((at, due, request))

    def conclude(self) -> None:
        """Late answers are forgiven where the manager itself was away: the renewal may stand just after the answer."""
        for at, due, request in self._late:
            nearest = min((abs(at - renewed) for renewed in self._renewed_at if renewed >= due), default=inf)
            if nearest > self._engines.config.lease_s:
                text = f"request {request} is answered {at - due:.3f} s after its deadline"
                self._findings.broke("I5", at, text)
