"""The optimizer of a stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polyrl.manifest.base import BY_VALUE, Count, ManifestModel

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(ManifestModel):
    """AdamW (Loshchilov and Hutter 2019) and its schedule."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Peak step size. RL wants far less than SFT, and tiny models far more than large ones: 1e-6 suits billions of
    parameters."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course after the warm-up; cosine and linear fall to 0 at the stage's last step."""
    warmup_steps: Count = 0
    """Optimizer steps in which the rate rises linearly from 0."""
    betas: Annotated[tuple[Beta, Beta], BY_VALUE] = (0.9, 0.95)
    """Decay of the first and second moment; 0.95 forgets outliers sooner than AdamW's 0.999."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the second moment, against division by 0."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled decay of weights per step, times the learning rate."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Global norm at which gradients are clipped."""
