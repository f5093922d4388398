"""Which samples in which pass of which learner, balanced by cost; all make as many passes as every other.

A learner is one rank, or several that have a pass together, each of them a slice of its tokens (context parallel). A
round is one pass of each at the same time: the ranks gather each other's weights in it, so that one that made a pass
less would let all others wait. A learner that has nothing left for a round makes an empty pass, whose gradient is 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from polyrl_trainer.backends.packing import PackingPolicy, Pass, plan_passes

Round = tuple[Pass, ...]
"""One pass a learner, in the order of their ranks."""

EMPTY: Final = Pass(rows=(), width=0)
"""A pass that learns nothing."""

ATTENTION_SHARE: Final = 1 / 6
"""Attention's operations as a share of the rest's, per token and per (sequence length / hidden size): 4 L H against the
24 H^2 of a block whose MLP is 4 H wide (Kaplan et al. 2020, arXiv 2001.08361, table 1)."""


def plan_rounds(
    lengths: Sequence[int], policy: PackingPolicy, learners: int, *, hidden_size: int, together: int = 1
) -> list[Round]:
    """Every sequence in exactly one row of one pass of one learner, so many consecutive ones `together`; deterministic.

    The longest unit goes first, each to the learner that has the least to do so far (Graham 1969), which is at most 4/3
    of the best there is. Raises ValueError as `plan_passes` does.
    """
    if len(lengths) % together:
        raise ValueError(f"{len(lengths)} sequences cannot be taken {together} at a time")
    units = [range(first, first + together) for first in range(0, len(lengths), together)]
    costs = [sum(_cost(lengths[index], hidden_size) for index in unit) for unit in units]
    loads = [(0.0, learner) for learner in range(learners)]
    shares: list[list[int]] = [[] for _ in range(learners)]
    for number in sorted(range(len(units)), key=lambda number: -costs[number]):
        load, learner = heapq.heappop(loads)
        shares[learner].extend(units[number])
        heapq.heappush(loads, (load + costs[number], learner))
    passes = [_passes_of(share, lengths, policy, together) for share in shares]
    most = max(len(of_learner) for of_learner in passes)
    return list(zip(*(of_learner + [EMPTY] * (most - len(of_learner)) for of_learner in passes), strict=True))


def _cost(length: int, hidden_size: int) -> float:
    return length * (1 + ATTENTION_SHARE * length / hidden_size)


def _passes_of(share: Sequence[int], lengths: Sequence[int], policy: PackingPolicy, together: int) -> list[Pass]:
    """Passes of one learner's samples, by their place in the whole batch."""
    planned = plan_passes([lengths[index] for index in share], policy, together)
    return [Pass(tuple(tuple(share[index] for index in row) for row in one.rows), one.width) for one in planned]
