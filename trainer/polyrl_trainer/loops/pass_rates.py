"""pass@k: the chance that at least one of k answers to a prompt passes, from n answers of which c passed.

Unbiased estimate 1 - C(n - c, k) / C(n, k) per prompt, then the mean over prompts (Chen et al. 2021, arXiv 2107.03374,
eq. 1). Drawing k of the n with replacement, as some report, is lower.

maj@k: how often the answer that most of k samples give is right; over the n, k at a time in the order of their numbers,
so no sample is in two votes. Among answers with equally many votes the first counts; samples without one don't vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Final

from polyrl.sample import Scored

MATCH: Final = "exact_match"
"""What a reward function names that knows right from wrong."""
WHOLE_REWARD: Final = 1.0
"""Reward of an answer that passes where the reward names no exact match, and the manifest no `passReward`."""


def pass_at(k: int, answers: int, passed: int) -> float:
    """The estimate of one prompt; 1 <= k <= answers."""
    return 1.0 - comb(answers - passed, k) / comb(answers, k)


def pass_rates(groups: Sequence[Sequence[bool]]) -> dict[str, float]:
    """`pass@1`, `pass@2`, `pass@4` ... up to the answers per prompt, and that number itself; empty with one answer.

    `groups`: of each prompt, whether each of its answers passed; as many of each, and at least one prompt.
    """
    answers = len(groups[0])
    if answers == 1:
        return {}
    rates = {
        f"pass@{k}": sum(pass_at(k, answers, sum(group)) for group in groups) / len(groups) for k in _sizes(answers)
    }
    return {**rates, f"avg@{answers}": rates["pass@1"]}


Vote = tuple[bool, float | None]
"""Whether a sample passed, and what stands for its answer; None: it gave none."""


def majority_rates(groups: Sequence[Sequence[Vote]]) -> dict[str, float]:
    """`maj@2`, `maj@4` ... up to the samples per prompt, and that number itself; empty where none has an answer."""
    answers = len(groups[0])
    if all(answer is None for group in groups for _, answer in group):
        return {}
    return {f"maj@{k}": sum(_majority_at(k, group) for group in groups) / len(groups) for k in _sizes(answers) if k > 1}


def _majority_at(k: int, group: Sequence[Vote]) -> float:
    votes = [group[begin : begin + k] for begin in range(0, len(group) - k + 1, k)]
    return sum(map(_majority_passes, votes)) / len(votes)


def _majority_passes(votes: Sequence[Vote]) -> bool:
    counted = Counter(answer for _, answer in votes if answer is not None).most_common(1)
    return bool(counted) and next(passed for passed, answer in votes if answer == counted[0][0])


def _sizes(answers: int) -> list[int]:
    return [*(1 << power for power in range(answers.bit_length()) if 1 << power < answers), answers]


def has_passed(scored: Scored, pass_reward: float | None) -> bool:
    """Whether an answer passes, as `recipe.evaluation.passReward` says."""
    if pass_reward is not None:
        return scored.reward >= pass_reward
    if MATCH in scored.metrics:
        return scored.metrics[MATCH] > 0
    return scored.reward >= WHOLE_REWARD


def matches(scored: Sequence[Scored]) -> list[float]:
    """The exact match of each answer, by its reward where that alone was named; empty where none of them has one."""
    if all(MATCH not in one.metrics for one in scored):
        return []
    return [one.metrics.get(MATCH, float(one.reward >= WHOLE_REWARD)) for one in scored]
