"""What is learned from pairs of answers, of which one was preferred: by the policy itself, or by a reward model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from polyrl.manifest.base import BY_VALUE, Count, ManifestModel
from polyrl.manifest.parts.optimizer import OptimizerSpec

Pairs = Annotated[int, Field(ge=1, le=1_048_576)]


class PreferenceLoss(StrEnum):
    """What a pair adds to DPO's loss, by the name that TRL gives it; d is by how much more the policy prefers the
    chosen answer than the reference does, in log-probability."""

    SIGMOID = "sigmoid"
    """-log sigmoid(beta d) (Rafailov et al. 2023, arXiv 2305.18290)."""
    IPO = "ipo"
    """(d - 1 / (2 beta))^2, each answer's part of d divided by its length (Azar et al. 2023, arXiv 2310.12036)."""
    HINGE = "hinge"
    """max(0, 1 - beta d) (SLiC, Zhao et al. 2023, arXiv 2305.10425)."""


class DpoSpec(ManifestModel):
    """Direct preference optimization, mode `dpo`: no engine and no reward; the model that it starts from is the
    reference, and lies in memory a second time."""

    steps: Count = 0
    """Optimizer steps."""
    batch_size: Pairs = 32
    """Pairs per optimizer step."""
    loss: Annotated[PreferenceLoss, BY_VALUE] = PreferenceLoss.SIGMOID
    """What a pair adds to the loss."""
    beta: Annotated[float, Field(gt=0, le=100)] = 0.1
    """How closely the policy is held to the reference: smaller lets it go further."""
    # Not `lt=0.5`: an API server cuts a bound to a whole number before it compares one, and 0 is not below 0.
    label_smoothing: Annotated[float, Field(ge=0, le=0.49)] = 0.0
    """Share of pairs that are taken to be labelled the wrong way round, below a half; with loss `sigmoid` (conservative
    DPO, Mitchell 2023)."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule."""


class RewardModelSpec(ManifestModel):
    """A reward model, mode `reward-model`: the model with a head of one number, which is to be higher for the chosen
    answer (Bradley and Terry 1952)."""

    steps: Count = 0
    """Optimizer steps."""
    batch_size: Pairs = 32
    """Pairs per optimizer step."""
    center_rewards_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps them around 0 (Eisenstein et al. 2023, arXiv
    2312.09244); 0.01 is usual, 0 leaves it out."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule. A head that begins with random weights wants more than DPO: 1e-5 to 1e-4."""
