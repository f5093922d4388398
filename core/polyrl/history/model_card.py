"""What lies beside a trained model's weights: `polyrl.json`, where it comes from, and README.md, the same for readers.

Both are made from the job and the numbers of a checkpoint. They go wherever the model goes, so they hold nothing of the
machine: of a folder only its last name, and no environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from polyrl.history.rows import value_text
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.parts.sources import HUB_ID
from polyrl.manifest.recipe import Mode, ModelSpec, RecipeSpec

ORIGIN: Final = "polyrl.json"
CARD: Final = "README.md"

MOMENTS: Final = {"base": "before", "afterSft": "after SFT", "afterDpo": "after DPO", "afterRl": "after RL"}

REWARD_MODEL: Final = "reward-model"
"""Stage whose models give a number instead of writing."""

COUNTS: Final = ("scored", "unscored")
"""Numbers of an evaluation that say nothing of the model."""


class ModelOrigin(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`polyrl.json`."""

    job: str
    base_model: str
    """A Hub id, a folder's name, or the architecture of a model that began with random weights."""
    stages: list[str]
    """What was run, a sentence each."""
    stage: str
    step: int
    """Whole steps of `stage` that these weights have seen."""
    groups: int = 0
    """Groups of the step after `step` that these weights have seen as well."""
    seed: int
    chat: bool
    """Prompts went through the chat template; else they began the text as they were."""
    max_new_tokens: int
    system_prompt: str = ""
    """Began every conversation."""
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = []
    """Strings that ended an answer."""
    stop_token_ids: list[int] = []
    """Tokens that ended one, beside those of the generation config."""
    reward_function: str | None = None
    reward: float | None = None
    """Mean of the newest RL step."""
    evaluations: dict[str, dict[str, float]] = {}
    """Named numbers by moment: base, afterSft, afterDpo, afterRl."""
    polyrl_version: str = ""


def model_origin(job: PolyRLJob, stage: str, step: int, *, chat: bool, version: str) -> ModelOrigin:
    """What is known of a checkpoint's model before anything was measured."""
    recipe = job.spec.recipe
    return ModelOrigin(
        job=job.metadata.name,
        base_model=base_model(recipe.model),
        stages=list(_stages(recipe)),
        stage=stage,
        step=step,
        seed=recipe.seed,
        chat=chat,
        max_new_tokens=recipe.sampling.max_new_tokens,
        stop=recipe.sampling.stop,
        stop_token_ids=recipe.sampling.stop_token_ids,
        reward_function=recipe.reward.function if recipe.reward is not None else None,
        polyrl_version=version,
    )


def base_model(model: ModelSpec) -> str:
    """The base model's name for strangers."""
    if (source := model.source) is None:
        return f"a fresh {(model.config or {}).get('model_type', 'model')} with random weights"
    hub = source.hub if source.may_be_fetched else None
    return PurePath(source.path).name or "a folder" if hub is None else hub.name


def model_card(origin: ModelOrigin) -> str:
    """README.md as model hubs read it."""
    return "\n".join([*_front_matter(origin), "", *_body(origin), ""])


def _stages(recipe: RecipeSpec) -> Iterator[str]:
    sft, rl = recipe.sft, recipe.algorithm
    if recipe.mode.has_sft:
        yield f"SFT: {sft.steps} steps of {sft.batch_size} sequences, learning rate {sft.optimizer.learning_rate:g}"
    if recipe.mode is Mode.DPO:
        dpo = recipe.dpo
        yield (
            f"DPO ({dpo.loss.value}, beta {dpo.beta:g}): {dpo.steps} steps of {dpo.batch_size} pairs, learning rate"
            f" {dpo.optimizer.learning_rate:g}"
        )
    if recipe.mode is Mode.REWARD_MODEL:
        model = recipe.reward_model
        yield (
            f"Reward model: {model.steps} steps of {model.batch_size} pairs, learning rate"
            f" {model.optimizer.learning_rate:g}"
        )
    if recipe.mode.has_rl:
        where = " on finished samples" if recipe.mode is Mode.OFFLINE_RL else ""
        yield (
            f"{rl.name.upper()}{where}: {rl.steps} steps of {rl.prompts_per_step} prompts,"
            f" {recipe.sampling.samples_per_prompt} samples each, learning rate {rl.optimizer.learning_rate:g}"
        )


def _front_matter(origin: ModelOrigin) -> Iterator[str]:
    yield "---"
    yield "library_name: transformers"
    yield f"pipeline_tag: {'text-classification' if origin.stage == REWARD_MODEL else 'text-generation'}"
    if HUB_ID.fullmatch(origin.base_model):
        yield f"base_model: {origin.base_model}"
    yield "tags: [polyrl, reinforcement-learning]"
    yield "---"


def _body(origin: ModelOrigin) -> Iterator[str]:
    yield f"# {origin.job}"
    yield ""
    yield f"Trained with PolyRL {origin.polyrl_version} from {_cell(origin.base_model)}."
    begun = f" and {origin.groups} groups of the next" if origin.groups else ""
    yield f"These are the weights after step {origin.step} of stage {origin.stage}{begun}."
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in _rows(origin):
        yield f"| {name} | {_cell(value)} |"
    yield ""
    yield "## Use"
    yield ""
    if origin.chat:
        yield "Prompts are conversations: take them through the tokenizer's chat template (`apply_chat_template`)."
    else:
        yield "Prompts are plain text, without a chat template."
    example = _scoring_example(origin) if origin.stage == REWARD_MODEL else _example(origin)
    yield from ("", "```python", *example, "```")


def _rows(origin: ModelOrigin) -> Iterator[tuple[str, str]]:
    yield from (("recipe", stage) for stage in origin.stages)
    yield "seed", str(origin.seed)
    if origin.reward_function is not None:
        yield "reward", f"`{origin.reward_function}`"
    if origin.reward is not None:
        yield "mean reward of the newest RL step", value_text(origin.reward)
    for moment, numbers in origin.evaluations.items():
        measured = ", ".join(
            f"{name} {value_text(value)}" for name, value in numbers.items() if name.rpartition("/")[2] not in COUNTS
        )
        yield f"evaluation {MOMENTS.get(moment, moment)}", measured


def _example(origin: ModelOrigin) -> Iterator[str]:
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    yield ""
    yield 'folder = "."  # where this file lies'
    yield "tokenizer = AutoTokenizer.from_pretrained(folder)"
    yield "model = AutoModelForCausalLM.from_pretrained(folder)"
    if origin.chat:
        system = (
            f'{{"role": "system", "content": {json.dumps(origin.system_prompt)}}}, ' if origin.system_prompt else ""
        )
        yield f'messages = [{system}{{"role": "user", "content": "..."}}]'
        yield (
            "inputs = tokenizer.apply_chat_template("
            'messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")'
        )
    else:
        yield 'inputs = tokenizer("...", return_tensors="pt")'
    yield f"output = model.generate(**inputs, max_new_tokens={origin.max_new_tokens}, do_sample=False)"
    yield 'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))'


def _scoring_example(origin: ModelOrigin) -> Iterator[str]:
    yield "from transformers import AutoModelForSequenceClassification, AutoTokenizer"
    yield ""
    yield 'folder = "."  # where this file lies'
    yield "tokenizer = AutoTokenizer.from_pretrained(folder)"
    yield "model = AutoModelForSequenceClassification.from_pretrained(folder)"
    if origin.chat:
        yield 'messages = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        yield 'inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")'
    else:
        yield 'inputs = tokenizer("prompt" + "answer" + tokenizer.eos_token, return_tensors="pt")'
    yield "print(model(**inputs).logits[0, 0].item())  # the higher, the better"


def _cell(text: str) -> str:
    """Within a Markdown table, on one line."""
    return " ".join(text.split()).replace("|", "\\|")
