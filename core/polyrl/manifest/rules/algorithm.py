"""What must hold between the fields of `recipe.algorithm`, and between them and the samples that it learns from."""

from __future__ import annotations

from typing import Final

from pydantic.alias_generators import to_snake

from polyrl.manifest.parts.algorithm import (
    AdvantageEstimator,
    Correction,
    GroupFilter,
    KlEstimator,
    KlPlace,
    OldLogProbs,
    PolicyLoss,
)
from polyrl.manifest.parts.critic import CriticSpec, CriticTrunk
from polyrl.manifest.recipe import Mode
from polyrl.manifest.rules.rule import GENERATES, Rule, samples
from polyrl.manifest.spec import JobSpec

_ADVANTAGE: Final = (
    "(has(self.recipe.algorithm.advantage) ? self.recipe.algorithm.advantage : self.recipe.algorithm.name)"
)
_LOSS: Final = "(has(self.recipe.algorithm.policyLoss) ? self.recipe.algorithm.policyLoss : self.recipe.algorithm.name)"

MOST_PAID_TURNS: Final = 128
"""Their rewards travel among a sample's named numbers, of which they take half the room."""


def _of_generation(field: str, default: object, cel: str) -> Rule:
    """A field that says how samples come to be, or which of those that come may train."""
    return Rule(
        f"{field}-generates",
        f"recipe.algorithm.{field}",
        message="is of what engines generate; mode {recipe.mode} learns from its whole file as it stands: leave it out",
        holds=lambda s: s.recipe.mode is not Mode.OFFLINE_RL or getattr(s.recipe.algorithm, to_snake(field)) == default,
        cel=f"self.recipe.mode != 'offline-rl' || self.recipe.algorithm.{field} == {cel}",
    )


_CORRECTS: Final = (
    "has(self.recipe.algorithm.correction) ? self.recipe.algorithm.correction != 'none'"
    " : self.recipe.algorithm.oldLogProbs != 'bypass'"
)


def _corrects(spec: JobSpec) -> bool:
    algorithm = spec.recipe.algorithm
    if algorithm.correction is None:
        return algorithm.old_log_probs is not OldLogProbs.BYPASS
    return algorithm.correction is not Correction.NONE


def _has_free_ratio(spec: JobSpec) -> bool:
    """Whether a ratio without another bound above is in the loss."""
    algorithm = spec.recipe.algorithm
    clips = algorithm.loss_function is None and (algorithm.policy_loss or algorithm.name) != PolicyLoss.CISPO
    penalty = (algorithm.kl_place, algorithm.kl_estimator) == (KlPlace.LOSS, KlEstimator.K3_RATIO)
    return clips or (algorithm.kl_coefficient > 0 and penalty)


def _is_as_it_comes(critic: CriticSpec) -> bool:
    """But for its optimizer, whose many fields are not worth a rule."""
    return critic.model_copy(update={"optimizer": CriticSpec().optimizer}) == CriticSpec()


def _has_no_clip(spec: JobSpec) -> bool:
    algorithm = spec.recipe.algorithm
    return (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (None, None, 3)


ALGORITHM_RULES: Final[tuple[Rule, ...]] = (
    _of_generation("groupFilter", GroupFilter.NONE, cel="'none'"),
    _of_generation("overSamplingFactor", 1.0, cel="1.0"),
    _of_generation("maxStaleness", 0, cel="0"),
    _of_generation("overlongFilter", False, cel="false"),
    _of_generation("overlongBuffer", 0, cel="0"),
    Rule(
        "mini-batches-fit",
        "recipe.algorithm.miniBatchPrompts",
        message="{recipe.algorithm.miniBatchPrompts} does not divide promptsPerStep"
        " ({recipe.algorithm.promptsPerStep})",
        holds=lambda s: (
            s.recipe.algorithm.mini_batch_prompts is None
            or s.recipe.algorithm.prompts_per_step % s.recipe.algorithm.mini_batch_prompts == 0
        ),
        cel="!has(self.recipe.algorithm.miniBatchPrompts)"
        " || self.recipe.algorithm.promptsPerStep % self.recipe.algorithm.miniBatchPrompts == 0",
    ),
    Rule(
        "surplus-trains-next",
        "recipe.algorithm.overSamplingFactor",
        message="with maxStaleness above 0 what a step leaves over trains in the next one, which has no room for more"
        " than promptsPerStep groups of it: take 2 at most",
        holds=lambda s: s.recipe.algorithm.max_staleness == 0 or s.recipe.algorithm.over_sampling_factor <= 2,
        cel="self.recipe.algorithm.maxStaleness == 0 || self.recipe.algorithm.overSamplingFactor <= 2.0",
    ),
    Rule(
        "overlong-buffer-fits",
        "recipe.algorithm.overlongBuffer",
        message="{recipe.algorithm.overlongBuffer} tokens before the limit are more than sampling.maxNewTokens"
        " ({recipe.sampling.maxNewTokens})",
        holds=lambda s: s.recipe.algorithm.overlong_buffer <= s.recipe.sampling.max_new_tokens,
        cel="self.recipe.algorithm.overlongBuffer <= self.recipe.sampling.maxNewTokens",
    ),
    Rule(
        "whole-step-advantage",
        "recipe.algorithm.oldLogProbs",
        message="reinforce++ and gae scale by all samples of a step, so training has to wait for them: take recompute",
        holds=lambda s: (
            (s.recipe.algorithm.advantage or s.recipe.algorithm.name).value not in ("reinforce++", "gae", "ppo")
            or s.recipe.algorithm.old_log_probs is OldLogProbs.RECOMPUTE
            or s.recipe.algorithm.advantage_function is not None
        ),
        cel=f"has(self.recipe.algorithm.advantageFunction) || !({_ADVANTAGE} in ['reinforce++', 'gae', 'ppo'])"
        " || self.recipe.algorithm.oldLogProbs == 'recompute'",
    ),
    Rule(
        "critic-sees-samples",
        "recipe.algorithm.advantage",
        message="gae learns a critic of samples that the policy drew now; mode {recipe.mode} has none of them",
        holds=lambda s: s.recipe.mode is not Mode.OFFLINE_RL or not s.recipe.algorithm.uses_critic,
        cel="self.recipe.mode != 'offline-rl' || has(self.recipe.algorithm.advantageFunction)"
        f" || !({_ADVANTAGE} in ['gae', 'ppo'])",
    ),
    Rule(
        "turns-played",
        "recipe.algorithm.advantage",
        message="turnNorm compares turns that an environment answered, 128 of them at most: it needs recipe.environment"
        " with such a maxTurns, in a mode that generates",
        holds=lambda s: (
            s.recipe.algorithm.advantage is not AdvantageEstimator.TURN_NORM
            or (samples(s) and s.recipe.environment is not None and s.recipe.environment.max_turns <= MOST_PAID_TURNS)
        ),
        cel="!has(self.recipe.algorithm.advantage) || self.recipe.algorithm.advantage != 'turnNorm'"
        f" || ({GENERATES} && has(self.recipe.environment) && self.recipe.environment.maxTurns <= {MOST_PAID_TURNS})",
    ),
    Rule(
        "own-advantage-of-turns",
        "recipe.algorithm.advantageFunction",
        message="is shown what an environment gave for turns, 128 of them at most: recipe.environment.maxTurns is"
        " {recipe.environment.maxTurns}",
        holds=lambda s: (
            s.recipe.algorithm.advantage_function is None
            or s.recipe.environment is None
            or s.recipe.environment.max_turns <= MOST_PAID_TURNS
        ),
        cel="!has(self.recipe.algorithm.advantageFunction) || !has(self.recipe.environment)"
        f" || self.recipe.environment.maxTurns <= {MOST_PAID_TURNS}",
    ),
    Rule(
        "turns-discounted",
        "recipe.algorithm.turnDiscount",
        message="is of advantage turnNorm only",
        holds=lambda s: (
            s.recipe.algorithm.turn_discount == 1 or s.recipe.algorithm.advantage is AdvantageEstimator.TURN_NORM
        ),
        cel="self.recipe.algorithm.turnDiscount == 1.0 || (has(self.recipe.algorithm.advantage)"
        " && self.recipe.algorithm.advantage == 'turnNorm')",
    ),
    Rule(
        "critic-warms-up-alone",
        "recipe.algorithm.critic.warmupSteps",
        message="a critic on the policy's trunk cannot learn while the policy waits; take trunk own, or 0",
        holds=lambda s: (
            s.recipe.algorithm.critic.warmup_steps == 0 or s.recipe.algorithm.critic.trunk is CriticTrunk.OWN
        ),
        cel="self.recipe.algorithm.critic.warmupSteps == 0 || self.recipe.algorithm.critic.trunk == 'own'",
    ),
    Rule(
        "critic-warms-up",
        "recipe.algorithm.critic.warmupSteps",
        message="{recipe.algorithm.critic.warmupSteps} leave the policy no step of algorithm.steps"
        " ({recipe.algorithm.steps})",
        holds=lambda s: (
            s.recipe.algorithm.critic.warmup_steps == 0
            or s.recipe.algorithm.critic.warmup_steps < s.recipe.algorithm.steps
        ),
        cel="self.recipe.algorithm.critic.warmupSteps == 0"
        " || self.recipe.algorithm.critic.warmupSteps < self.recipe.algorithm.steps",
    ),
    Rule(
        "critic-learns",
        "recipe.algorithm.critic",
        message="is of advantage gae, as that of ppo is; no other has a critic: leave it out",
        holds=lambda s: s.recipe.algorithm.uses_critic or _is_as_it_comes(s.recipe.algorithm.critic),
        cel=f"(!has(self.recipe.algorithm.advantageFunction) && {_ADVANTAGE} in ['gae', 'ppo'])"
        " || (self.recipe.algorithm.critic.trunk == 'own' && self.recipe.algorithm.critic.coefficient == 0.1"
        " && self.recipe.algorithm.critic.gamma == 1.0 && self.recipe.algorithm.critic.gaeLambda == 1.0"
        " && self.recipe.algorithm.critic.valueClip == 0.5 && self.recipe.algorithm.critic.warmupSteps == 0)",
    ),
    Rule(
        "own-loss-alone",
        "recipe.algorithm.lossFunction",
        message="stands in place of policyLoss; leave one of the two out",
        holds=lambda s: s.recipe.algorithm.loss_function is None or s.recipe.algorithm.policy_loss is None,
        cel="!has(self.recipe.algorithm.lossFunction) || !has(self.recipe.algorithm.policyLoss)",
    ),
    Rule(
        "own-advantage-alone",
        "recipe.algorithm.advantageFunction",
        message="stands in place of advantage; leave one of the two out, and take another name than reinforce++, whose"
        " advantage is not of a group",
        holds=lambda s: (
            s.recipe.algorithm.advantage_function is None
            or (s.recipe.algorithm.advantage is None and s.recipe.algorithm.name != "reinforce++")
        ),
        cel="!has(self.recipe.algorithm.advantageFunction)"
        " || (!has(self.recipe.algorithm.advantage) && self.recipe.algorithm.name != 'reinforce++')",
    ),
    Rule(
        "reused-once",
        "recipe.algorithm.oldLogProbs",
        message="reuse takes one optimizer step per RL step, since its ratio is always 1; leave miniBatchPrompts and"
        " updateEpochs out, or take recompute",
        holds=lambda s: (
            s.recipe.algorithm.old_log_probs is not OldLogProbs.REUSE
            or (
                s.recipe.algorithm.update_epochs == 1
                and s.recipe.algorithm.mini_batch_prompts in (None, s.recipe.algorithm.prompts_per_step)
            )
        ),
        cel="self.recipe.algorithm.oldLogProbs != 'reuse' || (self.recipe.algorithm.updateEpochs == 1"
        " && (!has(self.recipe.algorithm.miniBatchPrompts)"
        " || self.recipe.algorithm.miniBatchPrompts == self.recipe.algorithm.promptsPerStep))",
    ),
    Rule(
        "clips-a-ratio",
        "recipe.algorithm.oldLogProbs",
        message="reuse has a ratio of 1 always, which clipLow, clipHigh and dualClip never bound: leave them out, or"
        " take bypass or recompute",
        holds=lambda s: s.recipe.algorithm.old_log_probs is not OldLogProbs.REUSE or _has_no_clip(s),
        cel="self.recipe.algorithm.oldLogProbs != 'reuse' || (!has(self.recipe.algorithm.clipLow)"
        " && !has(self.recipe.algorithm.clipHigh) && self.recipe.algorithm.dualClip == 3.0)",
    ),
    Rule(
        "dual-clip-bounds",
        "recipe.algorithm.dualClip",
        message="bounds the ratio of policyLoss clip and gspo, and that of a KL penalty by k3Ratio in the loss; here is"
        " neither: leave it out",
        holds=lambda s: s.recipe.algorithm.dual_clip == 3 or _has_free_ratio(s),
        cel=f"self.recipe.algorithm.dualClip == 3.0 || (!has(self.recipe.algorithm.lossFunction) && {_LOSS} != 'cispo')"
        " || (self.recipe.algorithm.klCoefficient > 0.0 && self.recipe.algorithm.klPlace == 'loss'"
        " && self.recipe.algorithm.klEstimator == 'k3Ratio')",
    ),
    Rule(
        "corrected-once",
        "recipe.algorithm.correction",
        message="{recipe.algorithm.correction} corrects a second time what the ratio of oldLogProbs bypass contains;"
        " take tokenMask, sequenceMask or none, or another oldLogProbs",
        holds=lambda s: (
            s.recipe.algorithm.old_log_probs is not OldLogProbs.BYPASS
            or s.recipe.algorithm.correction not in (Correction.TOKEN_TRUNCATE, Correction.SEQUENCE_TRUNCATE)
        ),
        cel="self.recipe.algorithm.oldLogProbs != 'bypass' || !has(self.recipe.algorithm.correction)"
        " || !(self.recipe.algorithm.correction in ['tokenTruncate', 'sequenceTruncate'])",
    ),
    Rule(
        "bound-of-a-correction",
        "recipe.algorithm.correctionHigh",
        message="bounds a correction, and there is none, as with oldLogProbs bypass unless one is named: leave it out,"
        " or take a correction",
        holds=lambda s: s.recipe.algorithm.correction_high == 2 or _corrects(s),
        cel=f"self.recipe.algorithm.correctionHigh == 2.0 || ({_CORRECTS})",
    ),
    Rule(
        "bound-of-a-mask",
        "recipe.algorithm.correctionLow",
        message="is of tokenMask and sequenceMask only",
        holds=lambda s: (
            s.recipe.algorithm.correction_low == 0
            or s.recipe.algorithm.correction in (Correction.TOKEN_MASK, Correction.SEQUENCE_MASK)
        ),
        cel="self.recipe.algorithm.correctionLow == 0.0 || (has(self.recipe.algorithm.correction)"
        " && self.recipe.algorithm.correction in ['tokenMask', 'sequenceMask'])",
    ),
    Rule(
        "penalty-weighs",
        "recipe.algorithm.klCoefficient",
        message="is 0, so there is no KL penalty: leave klPlace and klEstimator out, or give it a weight",
        holds=lambda s: (
            s.recipe.algorithm.kl_coefficient > 0
            or (s.recipe.algorithm.kl_place, s.recipe.algorithm.kl_estimator) == (KlPlace.LOSS, KlEstimator.K3_RATIO)
        ),
        cel="self.recipe.algorithm.klCoefficient > 0.0"
        " || (self.recipe.algorithm.klPlace == 'loss' && self.recipe.algorithm.klEstimator == 'k3Ratio')",
    ),
    Rule(
        "penalty-estimated",
        "recipe.algorithm.klEstimator",
        message="is of a KL penalty in the loss; with klPlace reward it is taken from the reward by k1: leave it out",
        holds=lambda s: (
            s.recipe.algorithm.kl_place is KlPlace.LOSS or s.recipe.algorithm.kl_estimator is KlEstimator.K3_RATIO
        ),
        cel="self.recipe.algorithm.klPlace == 'loss' || self.recipe.algorithm.klEstimator == 'k3Ratio'",
    ),
    Rule(
        "group-has-spread",
        "recipe.sampling.samplesPerPrompt",
        message="{recipe.algorithm.name} compares the samples of a group: {recipe.sampling.samplesPerPrompt} is too"
        " few, 2 is the least",
        holds=lambda s: (
            not samples(s)
            or s.recipe.sampling.samples_per_prompt >= 2
            or s.recipe.algorithm.advantage_function is not None
            or (s.recipe.algorithm.advantage or s.recipe.algorithm.name).value in ("reinforce++", "gae", "ppo")
        ),
        cel=f"!({GENERATES}) || self.recipe.sampling.samplesPerPrompt >= 2"
        " || has(self.recipe.algorithm.advantageFunction)"
        f" || {_ADVANTAGE} in ['reinforce++', 'gae', 'ppo']",
    ),
    Rule(
        "filtered-by-spread",
        "recipe.algorithm.groupFilter",
        message="nonzeroSpread compares the samples of a group: of one sample none would ever pass",
        holds=lambda s: (
            s.recipe.algorithm.group_filter is not GroupFilter.NONZERO_SPREAD
            or s.recipe.sampling.samples_per_prompt >= 2
        ),
        cel="self.recipe.algorithm.groupFilter != 'nonzeroSpread' || self.recipe.sampling.samplesPerPrompt >= 2",
    ),
    Rule(
        "filter-given",
        "recipe.algorithm.filterFunction",
        message="groupFilter custom needs a filterFunction (module:function)",
        holds=lambda s: (
            s.recipe.algorithm.group_filter is not GroupFilter.CUSTOM or s.recipe.algorithm.filter_function is not None
        ),
        cel="self.recipe.algorithm.groupFilter != 'custom' || has(self.recipe.algorithm.filterFunction)",
    ),
    Rule(
        "filter-used",
        "recipe.algorithm.filterFunction",
        message="is only called with groupFilter custom; groupFilter is {recipe.algorithm.groupFilter}",
        holds=lambda s: (
            s.recipe.algorithm.group_filter is GroupFilter.CUSTOM or s.recipe.algorithm.filter_function is None
        ),
        cel="self.recipe.algorithm.groupFilter == 'custom' || !has(self.recipe.algorithm.filterFunction)",
    ),
    Rule(
        "filtered-groups-bounded",
        "recipe.algorithm.maxFilteredGroupsPerStep",
        message="bounds what a filter refuses, and groupFilter is {recipe.algorithm.groupFilter}: leave it out",
        holds=lambda s: (
            s.recipe.algorithm.group_filter is not GroupFilter.NONE
            or s.recipe.algorithm.max_filtered_groups_per_step is None
        ),
        cel="self.recipe.algorithm.groupFilter != 'none' || !has(self.recipe.algorithm.maxFilteredGroupsPerStep)",
    ),
)
