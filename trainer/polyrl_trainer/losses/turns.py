"""Advantages per turn of an episode: what came of a turn, against the same turn of the group's other samples.

    rewards of an environment  r_0, r_1 ... r_K, the reward function's added to the last
    returns                    R_k = r_k + gamma R_{k+1}
    advantages                 of turn k: (R_k - mean) / (std + eps) over the group's samples that had a turn k

The comparison by the turn's number is MT-GRPO's (Zeng et al. 2025, arXiv 2505.11821, section 4.2), the discounted
return that of GiGPO's steps (Feng et al. 2025, arXiv 2505.10978, eq. 7), which compares equal states instead. A turn
that only one sample had is compared with nothing, and its advantage is 0. With one turn it is GRPO's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from polyrl_trainer.sample import Sample

Floats = npt.NDArray[np.float64]


def turn_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """R_k of each turn, [K], in units of the reward."""
    returns, after = [0.0] * len(rewards), 0.0
    for turn in reversed(range(len(rewards))):
        after = returns[turn] = rewards[turn] + discount * after
    return returns


def by_turn(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    costs: Sequence[Floats],
    *,
    discount: float,
    compared: Callable[[Floats], Floats],
) -> list[Floats]:
    """float64[T] for each sample: the advantage of the turn that a position belongs to. `rewards` are those at the end,
    penalties for length taken off; `costs` [T] what a KL penalty takes off each token; `compared` a group's numbers
    with each other."""
    returns = [
        turn_returns(_paid(sample, reward, cost), discount)
        for sample, reward, cost in zip(samples, rewards, costs, strict=True)
    ]
    found = [np.zeros(sample.length) for sample in samples]
    for places in _groups(samples):
        for turn in range(max(len(returns[place]) for place in places)):
            there = [place for place in places if turn < len(returns[place])]
            values = compared(np.array([returns[place][turn] for place in there]))
            for place, value in zip(there, values, strict=True):
                found[place][_starts(samples[place])[turn] :] = value
    return found


def _paid(sample: Sample, reward: float, cost: Floats) -> list[float]:
    """What each turn gave."""
    starts = _starts(sample)
    ends = [*starts[1:], sample.length]
    given = [*sample.turn_rewards, *[0.0] * len(starts)][: len(starts)]
    paid = [one - float(cost[start:end].sum()) for one, start, end in zip(given, starts, ends, strict=True)]
    paid[-1] += reward
    return paid


def _starts(sample: Sample) -> tuple[int, ...]:
    return sample.turn_starts or (sample.prompt_length,)


def _groups(samples: Sequence[Sample]) -> list[list[int]]:
    places: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.group, []).append(place)
    return list(places.values())
