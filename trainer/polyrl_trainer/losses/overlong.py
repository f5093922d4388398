"""What length costs: DAPO's soft overlong punishment, and samples that were cut left out (Yu et al. 2025, arXiv
2503.14476, section 3.4). Both act after the group filter, which looks at the task's reward alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import Finish
from polyrl_trainer.losses.advantages import whitened, with_advantages
from polyrl_trainer.losses.own import GroupAdvantage
from polyrl_trainer.losses.presets import scales_by_step
from polyrl_trainer.sample import Sample


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """min(0, (limit - buffer - length) / buffer), at least -1 as in TRL; 0 without a buffer. Lengths in generated
    tokens. Source: DAPO, eq. 13."""
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer)) if buffer else 0.0


def shaped_advantages(samples: Sequence[Sample], recipe: RecipeSpec, own: GroupAdvantage | None = None) -> list[Sample]:
    """The same samples with penalty and advantage; one that was cut has its part in the group's mean, and with
    `overlong_filter` the advantage 0 and no other part in the loss, so that it is neither rewarded nor punished."""
    algorithm, limit = recipe.algorithm, recipe.sampling.max_new_tokens
    if algorithm.overlong_buffer:
        samples = [
            replace(one, penalty=overlong_penalty(int(one.loss_mask.sum()), limit, algorithm.overlong_buffer))
            for one in samples
        ]
    shaped = with_advantages(samples, algorithm, own)
    return shaped if scales_by_step(algorithm) else _without_truncated(shaped, algorithm)


def of_whole_step(samples: Sequence[Sample], algorithm: AlgorithmSpec) -> list[Sample]:
    """A whole step's samples with advantages that are its own: what was cut is in the mean and the spread of all, and
    then left out."""
    return _without_truncated(whitened(samples, algorithm), algorithm)


def _without_truncated(samples: Sequence[Sample], algorithm: AlgorithmSpec) -> list[Sample]:
    """With `overlong_filter` the samples that were cut have advantage 0 and are left out of the loss; without, all are
    as they were."""
    return [
        replace(one, advantages=np.zeros_like(one.loss_mask), left_out=True)
        if algorithm.overlong_filter and one.finish_reason == Finish.LENGTH
        else one
        for one in samples
    ]
