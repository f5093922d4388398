"""`spec.recipe.algorithm.critic`: the value function of PPO."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from polyrl.manifest.base import BY_VALUE, Count, ManifestModel
from polyrl.manifest.parts.optimizer import OptimizerSpec


class CriticTrunk(StrEnum):
    """What a critic's head stands on."""

    OWN = "own"
    """A model of its own, which begins as the policy does: neither disturbs the other."""
    SHARED = "shared"
    """The policy's: no second model, and one loss for both."""


class CriticOptimizerSpec(OptimizerSpec):
    """AdamW and its schedule, of the critic."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-5
    """Peak step size; ten times the policy's, as verl's: a head of one number begins with random weights."""


class CriticSpec(ManifestModel):
    """What `advantage: gae` learns beside the policy: what a sample will be rewarded, seen from each of its tokens."""

    trunk: Annotated[CriticTrunk, BY_VALUE] = CriticTrunk.OWN
    """What its head stands on."""
    coefficient: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Weight of the critic's loss beside the policy's, with a shared trunk."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a reward counts one token earlier."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Between the critic's word (0: little variance, its errors count) and what was rewarded (1) (GAE, Schulman et al.
    2016, arXiv 1506.02438)."""
    value_clip: Annotated[float, Field(gt=0, le=1_000_000)] = 0.5
    """How far a value may move from that of the step's start before it stops to learn, in units of the reward."""
    warmup_steps: Count = 0
    """RL steps at the beginning in which the critic alone learns; needs a trunk of its own."""
    optimizer: CriticOptimizerSpec = CriticOptimizerSpec()
    """AdamW and its schedule; with a shared trunk it is the policy's that counts."""
