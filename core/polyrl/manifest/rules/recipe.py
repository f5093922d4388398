"""Rules within `spec.recipe`: what each mode needs, where model and tokenizer come from, which numbers fit."""

from __future__ import annotations

from typing import Final

from polyrl.manifest.recipe import GroupFilter, Mode
from polyrl.manifest.rules.rule import SAMPLES, Rule, samples
from polyrl.manifest.spec import JobSpec


def _supervises(spec: JobSpec) -> bool:
    return spec.recipe.mode in (Mode.SFT, Mode.SFT_RL)


def _reinforces(spec: JobSpec) -> bool:
    return spec.recipe.mode is not Mode.SFT


_SUPERVISES: Final = "self.recipe.mode in ['sft', 'sft+rl']"
_REINFORCES: Final = "self.recipe.mode != 'sft'"
_CHARACTERS: Final = "self.recipe.model.tokenizer.type == 'characters'"
_ALPHABET: Final = "self.recipe.model.tokenizer.alphabet"

RECIPE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "model-given",
        "recipe.model",
        "needs path (a Hugging Face folder) or config (a fresh model)",
        lambda s: s.recipe.model.path is not None or s.recipe.model.config is not None,
        "has(self.recipe.model.path) || has(self.recipe.model.config)",
    ),
    Rule(
        "model-once",
        "recipe.model.config",
        "a model comes from path or from config, not from both",
        lambda s: s.recipe.model.path is None or s.recipe.model.config is None,
        "!has(self.recipe.model.path) || !has(self.recipe.model.config)",
    ),
    Rule(
        "sft-data",
        "recipe.data.sft",
        "mode {recipe.mode} needs at least one file of rows here",
        lambda s: not _supervises(s) or bool(s.recipe.data.sft),
        f"!({_SUPERVISES}) || size(self.recipe.data.sft) > 0",
    ),
    Rule(
        "sft-steps",
        "recipe.sft.steps",
        "mode {recipe.mode} needs at least 1 step",
        lambda s: not _supervises(s) or s.recipe.sft.steps > 0,
        f"!({_SUPERVISES}) || self.recipe.sft.steps > 0",
    ),
    Rule(
        "rl-data",
        "recipe.data.rl",
        "mode {recipe.mode} needs at least one file of rows here",
        lambda s: not _reinforces(s) or bool(s.recipe.data.rl),
        f"!({_REINFORCES}) || size(self.recipe.data.rl) > 0",
    ),
    Rule(
        "rl-steps",
        "recipe.algorithm.steps",
        "mode {recipe.mode} needs at least 1 step",
        lambda s: not _reinforces(s) or s.recipe.algorithm.steps > 0,
        f"!({_REINFORCES}) || self.recipe.algorithm.steps > 0",
    ),
    Rule(
        "reward-given",
        "recipe.reward",
        "mode {recipe.mode} needs a reward function (reward: with function: module:function)",
        lambda s: not samples(s) or s.recipe.reward is not None,
        f"!({SAMPLES}) || has(self.recipe.reward)",
    ),
    Rule(
        "eval-data",
        "recipe.evaluation.everySteps",
        "evaluating every {recipe.evaluation.everySteps} steps needs data.eval, which is empty",
        lambda s: s.recipe.evaluation.every_steps == 0 or bool(s.recipe.data.eval),
        "self.recipe.evaluation.everySteps == 0 || size(self.recipe.data.eval) > 0",
    ),
    Rule(
        "alphabet-given",
        "recipe.model.tokenizer.alphabet",
        "a tokenizer of type characters needs its alphabet",
        lambda s: s.recipe.model.tokenizer.type != "characters" or s.recipe.model.tokenizer.alphabet != "",
        f"!({_CHARACTERS}) || {_ALPHABET} != ''",
    ),
    Rule(
        "alphabet-distinct",
        "recipe.model.tokenizer.alphabet",
        "each character may stand in it only once",
        lambda s: len(set(s.recipe.model.tokenizer.alphabet)) == len(s.recipe.model.tokenizer.alphabet),
        f"{_ALPHABET}.split('').all(c, {_ALPHABET}.indexOf(c) == {_ALPHABET}.lastIndexOf(c))",
    ),
    Rule(
        "alphabet-used",
        "recipe.model.tokenizer.alphabet",
        "only a tokenizer of type characters has an alphabet; this one is of type {recipe.model.tokenizer.type}",
        lambda s: s.recipe.model.tokenizer.type == "characters" or s.recipe.model.tokenizer.alphabet == "",
        f"{_CHARACTERS} || {_ALPHABET} == ''",
    ),
    Rule(
        "tokenizer-found",
        "recipe.model.tokenizer",
        "a model made from config has no tokenizer of its own: set tokenizer.path, or type characters with an alphabet",
        lambda s: (
            s.recipe.model.tokenizer.type == "characters"
            or s.recipe.model.config is None
            or s.recipe.model.tokenizer.path is not None
        ),
        f"{_CHARACTERS} || !has(self.recipe.model.config) || has(self.recipe.model.tokenizer.path)",
    ),
    Rule(
        "mini-batches-fit",
        "recipe.algorithm.miniBatchPrompts",
        "{recipe.algorithm.miniBatchPrompts} does not divide promptsPerStep ({recipe.algorithm.promptsPerStep})",
        lambda s: (
            s.recipe.algorithm.mini_batch_prompts is None
            or s.recipe.algorithm.prompts_per_step % s.recipe.algorithm.mini_batch_prompts == 0
        ),
        "!has(self.recipe.algorithm.miniBatchPrompts)"
        " || self.recipe.algorithm.promptsPerStep % self.recipe.algorithm.miniBatchPrompts == 0",
    ),
    Rule(
        "group-has-spread",
        "recipe.sampling.samplesPerPrompt",
        "grpo compares the samples of a group: {recipe.sampling.samplesPerPrompt} is too few, 2 is the least",
        lambda s: not samples(s) or s.recipe.algorithm.name != "grpo" or s.recipe.sampling.samples_per_prompt >= 2,
        f"!({SAMPLES}) || self.recipe.algorithm.name != 'grpo' || self.recipe.sampling.samplesPerPrompt >= 2",
    ),
    Rule(
        "sampling-explores",
        "recipe.sampling.temperature",
        "at temperature 0 all samples of a group are equal, and mode {recipe.mode} learns nothing; raise it",
        lambda s: not samples(s) or s.recipe.sampling.temperature > 0,
        f"!({SAMPLES}) || self.recipe.sampling.temperature > 0.0",
    ),
    Rule(
        "filter-given",
        "recipe.algorithm.filterFunction",
        "groupFilter custom needs a filterFunction (module:function)",
        lambda s: (
            s.recipe.algorithm.group_filter is not GroupFilter.CUSTOM or s.recipe.algorithm.filter_function is not None
        ),
        "self.recipe.algorithm.groupFilter != 'custom' || has(self.recipe.algorithm.filterFunction)",
    ),
    Rule(
        "filter-used",
        "recipe.algorithm.filterFunction",
        "is only called with groupFilter custom; groupFilter is {recipe.algorithm.groupFilter}",
        lambda s: s.recipe.algorithm.group_filter is GroupFilter.CUSTOM or s.recipe.algorithm.filter_function is None,
        "self.recipe.algorithm.groupFilter == 'custom' || !has(self.recipe.algorithm.filterFunction)",
    ),
)
