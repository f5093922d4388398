"""What an algorithm's name stands for where the manifest leaves a choice open, and what a mini-batch is divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polyrl.manifest.parts.algorithm import AdvantageEstimator, Aggregation, AlgorithmName, AlgorithmSpec, PolicyLoss


@dataclass(frozen=True)
class AlgorithmPreset:
    """One row of the table of algorithms."""

    policy_loss: PolicyLoss = PolicyLoss.CLIP
    advantage: AdvantageEstimator = AdvantageEstimator.GROUP_NORM
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    clip: tuple[float, float] = (0.2, 0.2)
    """clipLow and clipHigh."""


PRESETS: Final = {
    AlgorithmName.GRPO: AlgorithmPreset(),
    AlgorithmName.DR_GRPO: AlgorithmPreset(advantage=AdvantageEstimator.GROUP_MEAN, aggregation=Aggregation.CONSTANT),
    AlgorithmName.DAPO: AlgorithmPreset(aggregation=Aggregation.TOKEN_MEAN, clip=(0.2, 0.28)),
    AlgorithmName.GSPO: AlgorithmPreset(PolicyLoss.GSPO, clip=(3e-4, 4e-4)),
    AlgorithmName.CISPO: AlgorithmPreset(PolicyLoss.CISPO, aggregation=Aggregation.TOKEN_MEAN, clip=(1.0, 4.0)),
    AlgorithmName.RLOO: AlgorithmPreset(advantage=AdvantageEstimator.RLOO, aggregation=Aggregation.SEQUENCE_SUM),
    AlgorithmName.REINFORCE_PLUS_PLUS: AlgorithmPreset(
        advantage=AdvantageEstimator.REINFORCE_PLUS_PLUS, aggregation=Aggregation.TOKEN_MEAN
    ),
    AlgorithmName.PPO: AlgorithmPreset(advantage=AdvantageEstimator.GAE, aggregation=Aggregation.TOKEN_MEAN),
}


def policy_loss_of(algorithm: AlgorithmSpec) -> PolicyLoss:
    """The manifest's, else the name's."""
    return algorithm.policy_loss or PRESETS[algorithm.name].policy_loss


def advantage_of(algorithm: AlgorithmSpec) -> AdvantageEstimator:
    """The manifest's, else the name's."""
    return algorithm.advantage or PRESETS[algorithm.name].advantage


def scales_by_step(algorithm: AlgorithmSpec) -> bool:
    """Whether advantages are those of the samples of a whole step."""
    whole = (AdvantageEstimator.REINFORCE_PLUS_PLUS, AdvantageEstimator.GAE)
    return algorithm.advantage_function is None and advantage_of(algorithm) in whole


def aggregation_of(algorithm: AlgorithmSpec) -> Aggregation:
    """The manifest's, else the name's."""
    return algorithm.aggregation or PRESETS[algorithm.name].aggregation


def clip_of(algorithm: AlgorithmSpec) -> tuple[float, float]:
    """The lowest and the highest ratio, 1 - clipLow and 1 + clipHigh: the manifest's, else the name's.

    CISPO's weight is bound in the same way, as in verl and slime; TRL's `epsilon_high` is the upper end itself, so that
    its 5 is a clipHigh of 4, and has no lower end, which is a clipLow of 1."""
    low, high = PRESETS[algorithm.name].clip
    low = low if algorithm.clip_low is None else algorithm.clip_low
    high = high if algorithm.clip_high is None else algorithm.clip_high
    return 1.0 - low, 1.0 + high


def normalizer(algorithm: AlgorithmSpec, samples: int, tokens: float, max_new_tokens: int) -> float:
    """What the mini-batch's summed loss is divided by: `samples` and learned `tokens` are those of the mini-batch."""
    match aggregation_of(algorithm):
        case Aggregation.SEQUENCE_MEAN | Aggregation.SEQUENCE_SUM:
            return float(samples)
        case Aggregation.TOKEN_MEAN:
            return tokens
        case Aggregation.CONSTANT:
            return float(samples * max_new_tokens)
