"""What must hold of the modes that learn from pairs of answers."""

from __future__ import annotations

from typing import Final

from polyrl.manifest.parts.preferences import PreferenceLoss
from polyrl.manifest.recipe import Mode
from polyrl.manifest.rules.rule import Rule

PREFERENCE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "preference-data",
        "recipe.data.preferences",
        message="mode {recipe.mode} needs at least one file of rows here",
        holds=lambda s: s.recipe.mode not in (Mode.DPO, Mode.REWARD_MODEL) or bool(s.recipe.data.preferences),
        cel="!(self.recipe.mode in ['dpo', 'reward-model']) || size(self.recipe.data.preferences) > 0",
    ),
    Rule(
        "dpo-steps",
        "recipe.dpo.steps",
        message="mode {recipe.mode} needs at least 1 step",
        holds=lambda s: s.recipe.mode is not Mode.DPO or s.recipe.dpo.steps > 0,
        cel="self.recipe.mode != 'dpo' || self.recipe.dpo.steps > 0",
    ),
    Rule(
        "reward-model-steps",
        "recipe.rewardModel.steps",
        message="mode {recipe.mode} needs at least 1 step",
        holds=lambda s: s.recipe.mode is not Mode.REWARD_MODEL or s.recipe.reward_model.steps > 0,
        cel="self.recipe.mode != 'reward-model' || self.recipe.rewardModel.steps > 0",
    ),
    Rule(
        "smoothing-used",
        "recipe.dpo.labelSmoothing",
        message="is of loss sigmoid only; loss is {recipe.dpo.loss}",
        holds=lambda s: s.recipe.dpo.loss is PreferenceLoss.SIGMOID or s.recipe.dpo.label_smoothing == 0,
        cel="self.recipe.dpo.loss == 'sigmoid' || self.recipe.dpo.labelSmoothing == 0.0",
    ),
    Rule(
        "reward-model-writes-nothing",
        "recipe.data.eval",
        message="a reward model writes nothing that could be evaluated; leave it out with mode {recipe.mode}",
        holds=lambda s: s.recipe.mode is not Mode.REWARD_MODEL or not s.recipe.data.eval,
        cel="self.recipe.mode != 'reward-model' || size(self.recipe.data.eval) == 0",
    ),
)
