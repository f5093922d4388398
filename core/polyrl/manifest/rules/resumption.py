"""What must be as it was when a run goes on from a checkpoint: what its tensors and its place in the data need.

All else may change: steps, learning rates, sampling, the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from operator import attrgetter
from typing import Any, Final, TypeAlias

from pydantic.alias_generators import to_snake

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.recipe import LoraSpec, RecipeSpec
from polyrl.manifest.spec import JobSpec


def _adapters(lora: LoraSpec | None) -> Any:
    return lora and (lora.rank, lora.alpha, sorted(lora.target_modules))


def _learner(algorithm: AlgorithmSpec) -> str:
    return "that of a critic" if algorithm.uses_critic else "without a critic"


FieldOfSpec: TypeAlias = tuple[tuple[str, ...], Callable[[JobSpec], Any]]

FIXED: Final[tuple[FieldOfSpec, ...]] = (
    *(
        (("recipe", *field.split(".")), attrgetter(f"recipe.{to_snake(field)}"))
        for field in (
            *("mode", "seed", "model.path", "model.revision", "model.tokenizer.type", "model.tokenizer.alphabet"),
            *("model.tokenizer.path", "model.tokenizer.chatTemplateKwargs", "algorithm.name", "algorithm.critic.trunk"),
            *("algorithm.optimizer.name", "algorithm.critic.optimizer.name", "sft.optimizer.name"),
            *("dpo.optimizer.name", "rewardModel.optimizer.name", "data.shuffle"),
        )
    ),
    (("recipe", "model", "config"), lambda spec: spec.recipe.model.config is None),
    (("recipe", "model", "lora"), lambda spec: _adapters(spec.recipe.model.lora)),
    (("recipe", "algorithm", "advantage"), lambda spec: _learner(spec.recipe.algorithm)),
    (("recipe", "data", "sft"), lambda spec: [one.weight for one in spec.recipe.data.sft]),
    (("recipe", "data", "rl"), lambda spec: [one.weight for one in spec.recipe.data.rl]),
    (("recipe", "data", "preferences"), lambda spec: [one.weight for one in spec.recipe.data.preferences]),
)
"""Path below spec, and what is compared: of data files their number and weights, for a folder may have moved."""


def changed_fields(began: JobSpec, now: JobSpec) -> list[tuple[tuple[str, ...], str]]:
    """Each field that may not differ and does, and a sentence that reads on from its name."""
    fixed = [(path, value(began), value(now)) for path, value in FIXED]
    one, other = (spec.recipe.model.config or {} for spec in (began, now))
    fixed += [(("recipe", "model", "config", key), one.get(key), other.get(key)) for key in sorted({*one, *other})]
    return [(path, _sentence(was, is_now)) for path, was, is_now in fixed if was != is_now]


def steps_of(recipe: RecipeSpec, stage: str) -> tuple[str, int]:
    """The field that says how many steps a stage has, and how many."""
    section = {"sft": "sft", "dpo": "dpo", "reward-model": "rewardModel"}.get(stage, "algorithm")
    return f"recipe.{section}.steps", getattr(recipe, to_snake(section)).steps


def checkpoint_faults(recipe: RecipeSpec, stage: str, step: int, groups: int) -> Iterator[tuple[str, str]]:
    """Each field by which a run cannot go on from its newest checkpoint, which has so many steps of a stage and
    `groups` of the next one, and a sentence that reads on from its name."""
    field, steps = steps_of(recipe, stage)
    if (begun := step + bool(groups)) > steps:
        of = f"{'in the middle of' if groups else 'of'} step {begun}"
        yield field, f"{steps} steps, but the newest checkpoint is {of}: ask for {begun} or more"
    if groups and (fault := mini_batch_fault(recipe.algorithm, groups)):
        yield "recipe.algorithm.miniBatchPrompts", fault


def mini_batch_fault(algorithm: AlgorithmSpec, trained_groups: int) -> str:
    """Why what is left of an RL step, of which so many groups are learned, is no whole mini-batches; empty: it is."""
    prompts = algorithm.prompts_per_step
    size = algorithm.mini_batch_prompts or prompts
    if prompts > trained_groups and (prompts - trained_groups) % size == 0:
        return ""
    return (
        f"the checkpoint has learned {trained_groups} groups of the next step, and what is left of promptsPerStep "
        f"{prompts} is no multiple of miniBatchPrompts {size}: go on with both as they were"
    )


def _sentence(was: Any, now: Any) -> str:
    if all(isinstance(value, str | int | Enum) for value in (was, now)):
        return f"was {_shown(was)} when the run began, {_shown(now)} now; put it back, or begin a new run"
    return "is not what the run began with, and its checkpoints fit nothing else; put it back or begin a new run"


def _shown(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)
