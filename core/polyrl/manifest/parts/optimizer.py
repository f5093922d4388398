"""The optimizer of a stage."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from polyrl.manifest.base import BY_VALUE, Count, ManifestModel

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerName(StrEnum):
    """How AdamW's two moments are held."""

    ADAMW = "adamw"
    """In float32."""
    ADAMW_8BIT = "adamw_8bit"
    """In 8 bits, with a scale for each 256 values of a row (Dettmers et al. 2021, arXiv 2110.02861)."""


class OptimizerSpec(ManifestModel):
    """AdamW (Loshchilov and Hutter 2019) and its schedule."""

    name: Annotated[OptimizerName, BY_VALUE] = OptimizerName.ADAMW
    """`adamw` holds the two moments in float32, 8 bytes a parameter; `adamw_8bit` takes 2.03 of matrices whose rows
    divide by 256, and its numbers differ a little. A run goes on with the one that it began with."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Peak step size. RL wants far less than SFT, and tiny models far more than large ones: 1e-6 suits billions of
    parameters."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course after the warm-up; cosine and linear fall so that the step after the stage's last one would have 0."""
    warmup_steps: Count = 0
    """Optimizer steps before the full rate: the k-th of them has k / (warmupSteps + 1) of it, so none has 0."""
    betas: Annotated[tuple[Beta, Beta], BY_VALUE] = (0.9, 0.95)
    """Decay of the first and second moment; 0.95 forgets outliers sooner than AdamW's 0.999."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the second moment, against division by 0."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled decay of weights per step, times the learning rate; biases and norms have none."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Global norm at which gradients are clipped."""
