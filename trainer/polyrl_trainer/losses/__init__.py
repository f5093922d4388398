"""Losses and advantages as pure functions: no model, no state.

    presets          what an algorithm's name stands for
    advantages       rewards to advantages, per group or per step
    policy_gradient  the loss of every policy gradient; `correction` weighs its tokens for what engines drew otherwise
    sft              the supervised loss, and how named sums add up
    turns            advantages per turn of an episode, by its environment's rewards
    critic           what a critic makes of rewards (GAE), and what it learns
    own              the user's own loss and advantage in place of named ones
    preferences      the losses of pairs of answers: DPO, reward model
    by_engine        the same sums by the engine that drew the tokens

Each formula stands in its function's docstring with its source. A new algorithm is a member of `AlgorithmName` and a
row of `presets.PRESETS`; a new policy loss is a member of `PolicyLoss` and a branch in `policy_gradient`.
"""

from functools import partial

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl_trainer.backend import Loss
from polyrl_trainer.losses.advantages import whitened, with_advantages
from polyrl_trainer.losses.critic import with_value_loss
from polyrl_trainer.losses.own import TokenLoss
from polyrl_trainer.losses.policy_gradient import learns_entropy, policy_gradient
from polyrl_trainer.losses.presets import normalizer
from polyrl_trainer.losses.sft import averages, merge, sft_loss

__all__ = [
    "averages",
    "learns_entropy",
    "merge",
    "normalizer",
    "policy_loss",
    "sft_loss",
    "whitened",
    "with_advantages",
]


def policy_loss(algorithm: AlgorithmSpec, own: TokenLoss | None = None) -> Loss:
    """The loss that the manifest's algorithm names, with its numbers filled in; `own` in place of its policy loss; of a
    policy that is its own critic the value loss too."""
    policy = partial(policy_gradient, algorithm=algorithm, own=own)
    return with_value_loss(policy, algorithm) if algorithm.shares_trunk else policy
