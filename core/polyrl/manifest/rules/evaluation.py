"""What must hold of an evaluation's sets and of how they are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polyrl.manifest.data import EvaluationSampling
from polyrl.manifest.recipe import SamplingSpec
from polyrl.manifest.rules.rule import IS_ONLINE, Rule
from polyrl.manifest.spec import JobSpec
from polyrl.sample import LEAST_TEMPERATURE


def _samplings(spec: JobSpec) -> Iterator[EvaluationSampling]:
    evaluation = spec.recipe.evaluation
    yield evaluation.sampling
    yield from (one.sampling for one in evaluation.sets if one.sampling is not None)


def _over_samplings(predicate: str) -> str:
    """CEL: the predicate, over SAMPLING, holds for every one that the manifest has."""
    own = predicate.replace("SAMPLING", "self.recipe.evaluation.sampling")
    of_set = predicate.replace("SAMPLING", "e.sampling")
    return f"({own}) && self.recipe.evaluation.sets.all(e, !has(e.sampling) || ({of_set}))"


def _draws_differ(sampling: EvaluationSampling) -> bool:
    return sampling.samples_per_prompt == 1 or sampling.temperature is None or sampling.temperature > 0


def _is_understood(sampling: SamplingSpec | EvaluationSampling) -> bool:
    """By all engines, and by the learner, as the same."""
    return sampling.top_k != 0 and (not sampling.temperature or sampling.temperature >= LEAST_TEMPERATURE)


_UNDERSTOOD: Final = (
    "SAMPLING.topK != 0 && (!has(SAMPLING.temperature) || SAMPLING.temperature == 0.0 || SAMPLING.temperature >= 0.01)"
)

EVALUATION_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "sampling-understood",
        "recipe",
        message="has, in sampling or in an evaluation, a temperature neither 0 nor at least 0.01, or a topK of 0"
        " (-1 keeps all): engines read them differently, or refuse them",
        holds=lambda s: _is_understood(s.recipe.sampling) and all(map(_is_understood, _samplings(s))),
        cel=_over_samplings(_UNDERSTOOD) + f" && {_UNDERSTOOD.replace('SAMPLING', 'self.recipe.sampling')}",
    ),
    Rule(
        "eval-data",
        "recipe.evaluation.everySteps",
        message="evaluating every {recipe.evaluation.everySteps} steps needs data.eval, which is empty",
        holds=lambda s: s.recipe.evaluation.every_steps == 0 or bool(s.recipe.data.eval),
        cel="self.recipe.evaluation.everySteps == 0 || size(self.recipe.data.eval) > 0",
    ),
    Rule(
        "eval-steps-generate",
        "recipe.evaluation.everySteps",
        message="counts RL steps whose weights engines have; mode {recipe.mode} has none of them: leave it out",
        holds=lambda s: s.recipe.evaluation.every_steps == 0 or s.recipe.mode.is_online,
        cel=f"self.recipe.evaluation.everySteps == 0 || {IS_ONLINE}",
    ),
    Rule(
        "eval-steps-supervised",
        "recipe.evaluation.everySftSteps",
        message="counts SFT steps; mode {recipe.mode} has none of them: leave it out",
        holds=lambda s: s.recipe.evaluation.every_sft_steps == 0 or s.recipe.mode.has_sft,
        cel="self.recipe.evaluation.everySftSteps == 0 || self.recipe.mode in ['sft', 'sft+rl']",
    ),
    Rule(
        "eval-data-sft",
        "recipe.evaluation.everySftSteps",
        message="evaluating every {recipe.evaluation.everySftSteps} SFT steps needs data.eval, which is empty",
        holds=lambda s: s.recipe.evaluation.every_sft_steps == 0 or bool(s.recipe.data.eval),
        cel="self.recipe.evaluation.everySftSteps == 0 || size(self.recipe.data.eval) > 0",
    ),
    Rule(
        "eval-data-sets",
        "recipe.evaluation.sets",
        message="they come in addition to data.eval, which is empty; name the set that summaries show there",
        holds=lambda s: not s.recipe.evaluation.sets or bool(s.recipe.data.eval),
        cel="size(self.recipe.evaluation.sets) == 0 || size(self.recipe.data.eval) > 0",
    ),
    Rule(
        "eval-names",
        "recipe.evaluation.sets",
        message="two sets have the same name",
        holds=lambda s: len({one.name for one in s.recipe.evaluation.sets}) == len(s.recipe.evaluation.sets),
        cel="self.recipe.evaluation.sets.all(a, self.recipe.evaluation.sets.exists_one(b, b.name == a.name))",
    ),
    Rule(
        "eval-draws",
        "recipe.evaluation",
        message="greedy answers (temperature 0) to one prompt are all the same; samplesPerPrompt must be 1 with it",
        holds=lambda s: all(map(_draws_differ, _samplings(s))),
        cel=_over_samplings(
            "SAMPLING.samplesPerPrompt == 1 || !has(SAMPLING.temperature) || SAMPLING.temperature > 0.0"
        ),
    ),
    Rule(
        "eval-fits",
        "recipe.evaluation",
        message="a maxNewTokens leaves no room for a prompt in rollout.engine.maxContext ({rollout.engine.maxContext})",
        holds=lambda s: all((one.max_new_tokens or 0) < s.rollout.engine.max_context for one in _samplings(s)),
        cel=_over_samplings("!has(SAMPLING.maxNewTokens) || SAMPLING.maxNewTokens < self.rollout.engine.maxContext"),
    ),
)
