"""What must hold between the fields of `recipe.algorithm`, and between them and the samples that it learns from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pydantic.alias_generators import to_snake

from polyrl.manifest.parts.algorithm import (
    AdvantageEstimator,
    AlgorithmName,
    AlgorithmSpec,
    Correction,
    GroupFilter,
    KlEstimator,
    KlPlace,
    OldLogProbs,
    PolicyLoss,
)
from polyrl.manifest.parts.critic import CriticSpec, CriticTrunk
from polyrl.manifest.recipe import Mode
from polyrl.manifest.rules.rule import IS_ONLINE, Rule

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


_CORRECTS: Final = "has(its.correction) ? its.correction != 'none' : its.oldLogProbs != 'bypass'"


def _corrects(algorithm: AlgorithmSpec) -> bool:
    if algorithm.correction is None:
        return algorithm.old_log_probs is not OldLogProbs.BYPASS
    return algorithm.correction is not Correction.NONE


def _has_free_ratio(algorithm: AlgorithmSpec) -> bool:
    """Whether a ratio without another bound above is in the loss."""
    given = algorithm.policy_loss
    is_cispo = given is PolicyLoss.CISPO if given is not None else algorithm.name is AlgorithmName.CISPO
    clips = algorithm.loss_function is None and not is_cispo
    penalty = (algorithm.kl_place, algorithm.kl_estimator) == (KlPlace.LOSS, KlEstimator.K3_RATIO)
    return clips or (algorithm.kl_coefficient > 0 and penalty)


def _is_as_it_comes(critic: CriticSpec) -> bool:
    """But for its optimizer, whose many fields are not worth a rule."""
    return critic.model_copy(update={"optimizer": CriticSpec().optimizer}) == CriticSpec()


def _its(name: str, field: str, *, message: str, holds: Callable[[AlgorithmSpec], bool], cel: str) -> Rule:
    """Between fields of recipe.algorithm alone; `its.` in `cel` stands for it."""
    return Rule(
        name,
        f"recipe.algorithm.{field}",
        message=message,
        holds=lambda s: holds(s.recipe.algorithm),
        cel=cel.replace("its.", "self.recipe.algorithm."),
    )


ALGORITHM_RULES: Final[tuple[Rule, ...]] = (
    _of_generation("groupFilter", GroupFilter.NONE, cel="'none'"),
    _of_generation("overSamplingFactor", 1.0, cel="1.0"),
    _of_generation("maxStaleness", 0, cel="0"),
    _of_generation("overlongFilter", False, cel="false"),
    _of_generation("overlongBuffer", 0, cel="0"),
    _its(
        "mini-batches-fit",
        "miniBatchPrompts",
        message="{recipe.algorithm.miniBatchPrompts} does not divide promptsPerStep"
        " ({recipe.algorithm.promptsPerStep})",
        holds=lambda a: a.mini_batch_prompts is None or a.prompts_per_step % a.mini_batch_prompts == 0,
        cel="!has(its.miniBatchPrompts) || its.promptsPerStep % its.miniBatchPrompts == 0",
    ),
    _its(
        "surplus-trains-next",
        "overSamplingFactor",
        message="with maxStaleness above 0 what a step leaves over trains in the next one, which has no room for more"
        " than promptsPerStep groups of it: take 2 at most",
        holds=lambda a: a.max_staleness == 0 or a.over_sampling_factor <= 2,
        cel="its.maxStaleness == 0 || its.overSamplingFactor <= 2.0",
    ),
    Rule(
        "overlong-buffer-fits",
        "recipe.algorithm.overlongBuffer",
        message="{recipe.algorithm.overlongBuffer} tokens before the limit are more than sampling.maxNewTokens"
        " ({recipe.sampling.maxNewTokens})",
        holds=lambda s: s.recipe.algorithm.overlong_buffer <= s.recipe.sampling.max_new_tokens,
        cel="self.recipe.algorithm.overlongBuffer <= self.recipe.sampling.maxNewTokens",
    ),
    _its(
        "whole-step-advantage",
        "oldLogProbs",
        message="reinforce++ and gae scale by all samples of a step, so training has to wait for them: take recompute",
        holds=lambda a: (
            (a.advantage or a.name).value not in ("reinforce++", "gae", "ppo")
            or a.old_log_probs is OldLogProbs.RECOMPUTE
            or a.advantage_function is not None
        ),
        cel=f"has(its.advantageFunction) || !({_ADVANTAGE} in ['reinforce++', 'gae', 'ppo'])"
        " || its.oldLogProbs == 'recompute'",
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
            or (
                s.recipe.mode.is_online
                and s.recipe.environment is not None
                and s.recipe.environment.max_turns <= MOST_PAID_TURNS
            )
        ),
        cel="!has(self.recipe.algorithm.advantage) || self.recipe.algorithm.advantage != 'turnNorm'"
        f" || ({IS_ONLINE} && has(self.recipe.environment) && self.recipe.environment.maxTurns <= {MOST_PAID_TURNS})",
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
    _its(
        "turns-discounted",
        "turnDiscount",
        message="is of advantage turnNorm only",
        holds=lambda a: a.turn_discount == 1 or a.advantage is AdvantageEstimator.TURN_NORM,
        cel="its.turnDiscount == 1.0 || (has(its.advantage) && its.advantage == 'turnNorm')",
    ),
    _its(
        "critic-warms-up-alone",
        "critic.warmupSteps",
        message="a critic on the policy's trunk cannot learn while the policy waits; take trunk own, or 0",
        holds=lambda a: a.critic.warmup_steps == 0 or a.critic.trunk is CriticTrunk.OWN,
        cel="its.critic.warmupSteps == 0 || its.critic.trunk == 'own'",
    ),
    _its(
        "critic-warms-up",
        "critic.warmupSteps",
        message="{recipe.algorithm.critic.warmupSteps} leave the policy no step of algorithm.steps"
        " ({recipe.algorithm.steps})",
        holds=lambda a: a.critic.warmup_steps == 0 or a.critic.warmup_steps < a.steps,
        cel="its.critic.warmupSteps == 0 || its.critic.warmupSteps < its.steps",
    ),
    _its(
        "critic-learns",
        "critic",
        message="is of advantage gae, as that of ppo is; no other has a critic: leave it out",
        holds=lambda a: a.uses_critic or _is_as_it_comes(a.critic),
        cel=f"(!has(its.advantageFunction) && {_ADVANTAGE} in ['gae', 'ppo']) || (its.critic.trunk == 'own'"
        " && its.critic.coefficient == 0.1 && its.critic.gamma == 1.0 && its.critic.gaeLambda == 1.0"
        " && its.critic.valueClip == 0.5 && its.critic.warmupSteps == 0)",
    ),
    _its(
        "own-loss-alone",
        "lossFunction",
        message="stands in place of policyLoss; leave one of the two out",
        holds=lambda a: a.loss_function is None or a.policy_loss is None,
        cel="!has(its.lossFunction) || !has(its.policyLoss)",
    ),
    _its(
        "own-advantage-alone",
        "advantageFunction",
        message="stands in place of advantage; leave one of the two out, and take another name than reinforce++, whose"
        " advantage is not of a group",
        holds=lambda a: a.advantage_function is None or (a.advantage is None and a.name != "reinforce++"),
        cel="!has(its.advantageFunction) || (!has(its.advantage) && its.name != 'reinforce++')",
    ),
    _its(
        "reused-once",
        "oldLogProbs",
        message="reuse takes one optimizer step per RL step, since its ratio is always 1; leave miniBatchPrompts and"
        " updateEpochs out, or take recompute",
        holds=lambda a: (
            a.old_log_probs is not OldLogProbs.REUSE
            or (a.update_epochs == 1 and a.mini_batch_prompts in (None, a.prompts_per_step))
        ),
        cel="its.oldLogProbs != 'reuse' || (its.updateEpochs == 1 && (!has(its.miniBatchPrompts)"
        " || its.miniBatchPrompts == its.promptsPerStep))",
    ),
    _its(
        "clips-a-ratio",
        "oldLogProbs",
        message="reuse has a ratio of 1 always, which clipLow, clipHigh and dualClip never bound: leave them out, or"
        " take bypass or recompute",
        holds=lambda a: (
            a.old_log_probs is not OldLogProbs.REUSE or (a.clip_low, a.clip_high, a.dual_clip) == (None, None, 3)
        ),
        cel="its.oldLogProbs != 'reuse' || (!has(its.clipLow) && !has(its.clipHigh) && its.dualClip == 3.0)",
    ),
    _its(
        "dual-clip-bounds",
        "dualClip",
        message="bounds the ratio of policyLoss clip and gspo, and that of a KL penalty by k3Ratio in the loss; here is"
        " neither: leave it out",
        holds=lambda a: a.dual_clip == 3 or _has_free_ratio(a),
        cel=f"its.dualClip == 3.0 || (!has(its.lossFunction) && {_LOSS} != 'cispo') || (its.klCoefficient > 0.0"
        " && its.klPlace == 'loss' && its.klEstimator == 'k3Ratio')",
    ),
    _its(
        "corrected-once",
        "correction",
        message="{recipe.algorithm.correction} corrects a second time what the ratio of oldLogProbs bypass contains;"
        " take tokenMask, sequenceMask or none, or another oldLogProbs",
        holds=lambda a: (
            a.old_log_probs is not OldLogProbs.BYPASS
            or a.correction not in (Correction.TOKEN_TRUNCATE, Correction.SEQUENCE_TRUNCATE)
        ),
        cel="its.oldLogProbs != 'bypass' || !has(its.correction)"
        " || !(its.correction in ['tokenTruncate', 'sequenceTruncate'])",
    ),
    _its(
        "bound-of-a-correction",
        "correctionHigh",
        message="bounds a correction, and there is none, as with oldLogProbs bypass unless one is named: leave it out,"
        " or take a correction",
        holds=lambda a: a.correction_high == 2 or _corrects(a),
        cel=f"its.correctionHigh == 2.0 || ({_CORRECTS})",
    ),
    _its(
        "bound-of-a-mask",
        "correctionLow",
        message="is of tokenMask and sequenceMask only",
        holds=lambda a: a.correction_low == 0 or a.correction in (Correction.TOKEN_MASK, Correction.SEQUENCE_MASK),
        cel="its.correctionLow == 0.0 || (has(its.correction) && its.correction in ['tokenMask', 'sequenceMask'])",
    ),
    _its(
        "penalty-weighs",
        "klCoefficient",
        message="is 0, so there is no KL penalty: leave klPlace and klEstimator out, or give it a weight",
        holds=lambda a: a.kl_coefficient > 0 or (a.kl_place, a.kl_estimator) == (KlPlace.LOSS, KlEstimator.K3_RATIO),
        cel="its.klCoefficient > 0.0 || (its.klPlace == 'loss' && its.klEstimator == 'k3Ratio')",
    ),
    _its(
        "penalty-estimated",
        "klEstimator",
        message="is of a KL penalty in the loss; with klPlace reward it is taken from the reward by k1: leave it out",
        holds=lambda a: a.kl_place is KlPlace.LOSS or a.kl_estimator is KlEstimator.K3_RATIO,
        cel="its.klPlace == 'loss' || its.klEstimator == 'k3Ratio'",
    ),
    Rule(
        "group-has-spread",
        "recipe.sampling.samplesPerPrompt",
        message="{recipe.algorithm.name} compares the samples of a group: {recipe.sampling.samplesPerPrompt} is too"
        " few, 2 is the least",
        holds=lambda s: (
            not s.recipe.mode.is_online
            or s.recipe.sampling.samples_per_prompt >= 2
            or s.recipe.algorithm.advantage_function is not None
            or (s.recipe.algorithm.advantage or s.recipe.algorithm.name).value in ("reinforce++", "gae", "ppo")
        ),
        cel=f"!({IS_ONLINE}) || self.recipe.sampling.samplesPerPrompt >= 2"
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
    _its(
        "filter-given",
        "filterFunction",
        message="groupFilter custom needs a filterFunction (module:function)",
        holds=lambda a: a.group_filter is not GroupFilter.CUSTOM or a.filter_function is not None,
        cel="its.groupFilter != 'custom' || has(its.filterFunction)",
    ),
    _its(
        "filter-used",
        "filterFunction",
        message="is only called with groupFilter custom; groupFilter is {recipe.algorithm.groupFilter}",
        holds=lambda a: a.group_filter is GroupFilter.CUSTOM or a.filter_function is None,
        cel="its.groupFilter == 'custom' || !has(its.filterFunction)",
    ),
    _its(
        "filtered-groups-bounded",
        "maxFilteredGroupsPerStep",
        message="bounds what a filter refuses, and groupFilter is {recipe.algorithm.groupFilter}: leave it out",
        holds=lambda a: a.group_filter is not GroupFilter.NONE or a.max_filtered_groups_per_step is None,
        cel="its.groupFilter != 'none' || !has(its.maxFilteredGroupsPerStep)",
    ),
)
