"""How a group ends untrained: one sample's fate takes its siblings along, because group statistics need all n."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from polyrl.ledger.events import GroupDiscarded
from polyrl.ledger.state import GroupState, LedgerState
from polyrl.ledger.transition import Transition
from polyrl.manifest.recipe import GroupFilter
from polyrl.sample import DiscardReason, sample_id
from polyrl.wire import Cancel, GroupDropped


def passes(group_filter: str, rewards: Sequence[float]) -> bool:
    """Whether a training group with these rewards passes. Dynamic sampling is DAPO's (Yu et al. 2025). `custom` passes
    everything here: the trainer decides it, through Reject."""
    if group_filter == GroupFilter.ANY_SUCCESS:
        return any(reward > 0 for reward in rewards)
    if group_filter == GroupFilter.NONZERO_SPREAD:
        return min(rewards) != max(rewards)
    return True


def discard_group(
    transition: Transition,
    number: int,
    reason: DiscardReason,
    culprit: str = "",
    detail: str = "",
    *,
    notify: bool = True,
) -> None:
    """Discards a live group: `culprit` for `reason`, its siblings as groupIncomplete; without one all for `reason`."""
    entry = transition.state.groups[number]
    for index in range(entry.group.n):
        assignment = transition.state.samples[sample_id(number, index)].assignment
        if assignment:
            transition.send(transition.state.assignments[assignment].engine, Cancel(assignment))
    event = GroupDiscarded(number, culprit, reason=reason, detail=detail, notify=notify, at=transition.now)
    transition.record(event)
    if notify:
        group = entry.group
        dropped = GroupDropped(number, group.step, purpose=group.purpose, reason=reason, detail=detail)
        transition.answer(dropped)


def discard_unservable(transition: Transition, groups: Sequence[int]) -> None:
    """Discards those with waiting samples that no engine can ever take: too old for every version, or too long."""
    serving: dict[tuple[int, int], _Serving] = {}
    for number in groups:
        entry = transition.state.groups.get(number)
        if entry is None or not entry.waiting:
            continue
        versions = (entry.group.min_version, entry.group.max_version)
        if versions not in serving:
            serving[versions] = _serving(transition.state, *versions)
        if serving[versions].never:
            newest = transition.state.weights.version
            text = f"weights are at version {newest}, it may use at most {entry.group.max_version}"
            discard_group(transition, number, DiscardReason.STALE, detail=text)
        elif serving[versions].context:
            _discard_if_longer(transition, entry, serving[versions].context)


class _Serving(NamedTuple):
    context: int
    """Longest context among engines that may generate; 0: there is no such engine."""
    never: bool
    """There will be none: versions only grow, and all are past the newest that may generate."""


def _serving(state: LedgerState, low: int, high: int) -> _Serving:
    engines = state.engines.values()
    context = max((e.capacity.max_context for e in engines if low <= e.version <= high and not e.draining), default=0)
    past = state.weights.version > high and all(e.version > high or e.draining for e in engines)
    return _Serving(context, past and not context)


def _discard_if_longer(transition: Transition, entry: GroupState, context: int) -> None:
    needed = max(needed_context(transition.state, entry, index) for index in entry.waiting)
    if needed > context:
        text = f"prompt, response so far and what is left of max_new_tokens are {needed} tokens; engines hold {context}"
        discard_group(transition, entry.group.id, DiscardReason.PROMPT_TOO_LONG, detail=text)


def needed_context(state: LedgerState, entry: GroupState, index: int) -> int:
    """Context that a sample can grow to, in tokens."""
    group = entry.group
    sample = state.samples[sample_id(group.id, index)]
    return len(group.prompt_ids) // 4 + sample.length + group.sampling.max_new_tokens - sample.generated
