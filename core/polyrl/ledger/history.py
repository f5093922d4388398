"""The lives of samples, told from facts: what `polyrl explain` prints and what outlives the tokens.

A journal forgets tokens once a batch is acknowledged; these events stay, a few hundred bytes per sample: which engines,
attempts and versions, which turns, which reward, which batch, which end and why.

Refuses to hold: tokens, files (see whoever keeps the journal). Read next: `codec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from polyrl.ledger import facts as f
from polyrl.ledger.state import State
from polyrl.sample import DiscardReason, sample_id


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One thing that happened to one sample, at `at` on the ledger's clock."""

    sample: str
    at: float
    kind: str
    """`submitted`, `assigned`, `moved`, `turnEnded`, `extended`, `scored`, `packed`, `acknowledged` or `discarded`."""
    data: dict[str, Any]


class Historian:
    """Turns facts into events. Holds only what facts leave unsaid: whose an assignment is, how large a group is."""

    def __init__(self, state: State) -> None:
        """`state`: the ledger's, as it is before the first fact that will be told."""
        self._sizes = {number: entry.group.n for number, entry in state.groups.items()}
        self._samples = {number: a.sample for number, a in state.assignments.items()}
        self._batches = {number: list(batch.groups) for number, batch in state.batches.items()}

    def tell(self, fact: f.Fact, state: State) -> Iterator[Event]:
        """The events of one fact; `state` is the ledger's after it, or after later facts of the same outcome."""
        match fact:
            case f.GroupSubmitted():
                yield from self._submitted(fact)
            case f.Assigned():
                self._samples[fact.assignment] = fact.sample
                engine = state.engines.get(fact.engine)
                data = {"engine": fact.engine, "version": -1 if engine is None else engine.version}
                yield Event(fact.sample, fact.at, "assigned", {"assignment": fact.assignment, **data})
            case f.Moved():
                name = self._samples.pop(fact.assignment)
                yield Event(name, fact.at, "moved", {"cause": fact.cause, "tokens": _length(state, name)})
            case f.TurnEnded():
                yield Event(fact.sample, fact.at, "turnEnded", {"finish": fact.finish, **_origin(state, fact.sample)})
            case f.TurnExtended():
                yield Event(fact.sample, fact.at, "extended", {"tokens": len(fact.ids) // 4})
            case f.SampleScored():
                yield Event(fact.sample, fact.at, "scored", {"reward": fact.reward, "metrics": fact.metrics})
            case f.BatchPacked():
                self._batches[fact.batch] = list(fact.groups)
                yield from self._each(fact.groups, fact.at, "packed", {"batch": fact.batch, "step": fact.request.step})
            case f.BatchAcknowledged():
                groups = self._batches.pop(fact.batch, [])
                yield from self._each(groups, fact.at, "acknowledged", {"batch": fact.batch})
                self._forget(groups)
            case f.GroupDiscarded():
                yield from self._discarded(fact)
                self._forget([fact.group])

    def _submitted(self, fact: f.GroupSubmitted) -> Iterator[Event]:
        group = fact.group
        self._sizes[group.group] = group.n
        data = {"step": group.step, "purpose": group.purpose, "promptTokens": len(group.prompt_ids) // 4}
        yield from self._each([group.group], fact.at, "submitted", data)

    def _discarded(self, fact: f.GroupDiscarded) -> Iterator[Event]:
        for event in self._each([fact.group], fact.at, "discarded", {}):
            sibling = bool(fact.culprit) and event.sample != fact.culprit
            reason = DiscardReason.GROUP_INCOMPLETE if sibling else fact.reason
            yield Event(event.sample, fact.at, "discarded", {"reason": reason, "detail": fact.detail})

    def _each(self, groups: list[int], at: float, kind: str, data: dict[str, Any]) -> Iterator[Event]:
        for number in groups:
            for index in range(self._sizes.get(number, 0)):
                yield Event(sample_id(number, index), at, kind, data)

    def _forget(self, groups: list[int]) -> None:
        for number in groups:
            self._sizes.pop(number, None)


def _length(state: State, name: str) -> int:
    sample = state.samples.get(name)
    return 0 if sample is None else sample.length


def _origin(state: State, name: str) -> dict[str, Any]:
    sample = state.samples.get(name)
    if sample is None:
        return {}
    spans = [[s.start, s.end, s.version, s.engine, s.attempt] for s in sample.spans]
    return {"turn": sample.turn, "tokens": sample.length, "spans": spans}
