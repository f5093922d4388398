"""What is reported of a batch of pairs."""

from __future__ import annotations

from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.loops.preference_loop import PreferenceStage, _of_pairs


def test_only_what_the_loss_says_of_pairs_is_divided_among_them() -> None:
    recipe = RecipeSpec.model_validate({"mode": "dpo", "dpo": {"steps": 1, "batchSize": 4}, "model": {"path": "m"}})
    device = {"device_flops_max": 1e13, "device_allocated_max": 3e9, "device_reserved_max": 4e9}
    sums = {"loss": 2.0, "tokens": 90.0, "positions": 99.0, "flops": 1e9, "learn_seconds": 0.1, "entropy": 7.0}
    values = _of_pairs({**sums, **device, "rewards/margins": 6.0}, PreferenceStage.of(recipe))
    assert values == {"dpo/loss": 0.5, "rewards/margins": 1.5}
