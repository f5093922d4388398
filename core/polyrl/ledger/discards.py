"""How a group ends untrained: one sample's fate takes its siblings along, because group statistics need all n.

Refuses to hold: which groups (see `filters`, `trainer`, `moves`). Read next: `packing`.
"""

from __future__ import annotations

from polyrl.ledger.decision import Decision
from polyrl.ledger.facts import GroupDiscarded
from polyrl.ledger.state import GroupState
from polyrl.sample import DiscardReason, sample_id
from polyrl.wire import Cancel, GroupDropped


def discard_group(
    d: Decision, number: int, reason: DiscardReason, culprit: str = "", detail: str = "", *, notify: bool = True
) -> None:
    """Discards a live group: `culprit` for `reason`, its siblings as groupIncomplete; without one all for `reason`."""
    entry = d.state.groups[number]
    for index in range(entry.group.n):
        assignment = d.state.samples[sample_id(number, index)].assignment
        if assignment:
            d.tell(d.state.assignments[assignment].engine, Cancel(assignment))
    d.record(GroupDiscarded(number, culprit, reason, detail, notify, d.now))
    if notify:
        d.answer(GroupDropped(number, entry.group.step, entry.group.purpose, reason, detail))


def discard_unservable(d: Decision) -> None:
    """Discards waiting groups that no engine can ever take: too old for every version that is left, or too long."""
    state = d.state
    for _, number in tuple(state.queue):
        entry = state.groups[number]
        reason, detail = _unservable(d, entry)
        if reason is not None:
            discard_group(d, number, reason, "", detail)


def _unservable(d: Decision, entry: GroupState) -> tuple[DiscardReason | None, str]:
    group, engines = entry.group, d.state.engines.values()
    fitting = [e for e in engines if group.min_version <= e.version <= group.max_version and not e.draining]
    if not fitting:
        # Versions only grow, so an engine that serves none of the range now will never serve one of it again.
        newest = d.state.version.version
        if newest > group.max_version and all(e.version > group.max_version or e.draining for e in engines):
            return DiscardReason.STALE, f"weights are at version {newest}, it may use at most {group.max_version}"
        return None, ""
    longest = max(e.max_context for e in fitting)
    needed = max(needed_context(d, entry, index) for index in entry.waiting)
    if needed <= longest:
        return None, ""
    text = f"prompt, response so far and what is left of max_new_tokens are {needed} tokens; engines hold {longest}"
    return DiscardReason.PROMPT_TOO_LONG, text


def needed_context(d: Decision, entry: GroupState, index: int) -> int:
    """Context that a sample can grow to, in tokens."""
    group = entry.group
    sample = d.state.samples[sample_id(group.group, index)]
    return len(group.prompt_ids) // 4 + sample.length + group.sampling.max_new_tokens - sample.generated
