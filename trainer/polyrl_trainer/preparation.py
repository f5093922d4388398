"""The user's data and tokenizer, loaded and checked before anything else starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from polyrl.errors import InvalidData
from polyrl.manifest.data import DatasetSpec, EvaluationSampling, evaluated_rows
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import Mode, RecipeSpec
from polyrl.weights import TOKENIZER_FILE
from polyrl_trainer.data import examples
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.columns import answered_rows, is_chat, prompt_rows, rows_digest
from polyrl_trainer.data.hub import local_path, model_folder
from polyrl_trainer.data.preferences import AnswerPair, pairs_are_chats, prepare_pairs, prepare_scored_pairs
from polyrl_trainer.data.rows import DataRow, read_rows
from polyrl_trainer.data.tokenizers import Tokenizer, load_tokenizer
from polyrl_trainer.sample import Sample

Item = TypeVar("Item")

POSITION_TABLES: Final = frozenset({"biogpt", "ctrl", "gpt2", "gpt_bigcode", "opt"})
"""Types of models that have a table of positions, and can be learned."""


@dataclass(frozen=True)
class EvaluationPrompts:
    """One set of an evaluation."""

    name: str
    """Name in `evaluation.sets`; empty: `data.eval`."""
    prompts: Sequence[examples.Prompt]
    sampling: EvaluationSampling
    pass_reward: float | None = None


@dataclass(frozen=True)
class Prepared:
    """What the user brought. Data of stages that do not run is None."""

    tokenizer: Tokenizer
    conversations: DataBuffer[Sample] | None
    prompts: DataBuffer[examples.Prompt] | None
    finished: DataBuffer[examples.FinishedGroup] | None
    pairs: DataBuffer[AnswerPair] | None
    evaluation: Sequence[EvaluationPrompts]
    """`data.eval` first; empty where that is."""
    chat: bool
    """Prompts went through the tokenizer's chat template."""
    system_prompt: str
    """The system prompt that begins every conversation; empty: none."""


def prepare(spec: JobSpec, manifest_dir: Path) -> Prepared:
    """Raises InvalidData."""
    recipe = spec.recipe
    tokenizer = tokenizer_of(recipe, manifest_dir)
    context = spec.rollout.engine.max_context

    rows = _reader(recipe, manifest_dir)

    def prompts(dataset: DatasetSpec, answer: int = recipe.sampling.max_new_tokens) -> list[examples.Prompt]:
        return examples.prepare_prompts(
            prompt_rows(rows(dataset.path), dataset),
            tokenizer,
            context - answer,
            max_skipped=recipe.data.max_long_prompts,
        )

    def answered(dataset: DatasetSpec) -> list[DataRow]:
        return answered_rows(rows(dataset.path), dataset)

    def buffer(datasets: Sequence[DatasetSpec], make: Callable[[DatasetSpec], list[Item]]) -> DataBuffer[Item]:
        sources = [make(dataset) for dataset in datasets]
        weights = [dataset.weight for dataset in datasets]
        files = [(dataset.path, rows_digest(rows(dataset.path), dataset)) for dataset in datasets]
        return DataBuffer(sources, weights, seed=recipe.seed, shuffle=recipe.data.shuffle, files=files)

    # Of the stage that has the last word; its first row speaks for all.
    newest = _newest_data(recipe)[0]
    conversations, to_generate, finished, pairs = None, None, None, None
    evaluation = []
    for one in evaluated_rows(recipe.data, recipe.evaluation):
        answer = one.sampling.max_new_tokens or recipe.sampling.max_new_tokens
        asked = [prompt for dataset in one.data for prompt in prompts(dataset, answer)][: one.max_samples]
        if one.reward is not None:
            asked = [replace(prompt, judge=one.name) for prompt in asked]
        evaluation.append(EvaluationPrompts(one.name, asked, sampling=one.sampling, pass_reward=one.pass_reward))
    if recipe.mode.has_sft:
        conversations = buffer(
            recipe.data.sft, lambda one: examples.prepare_conversations(answered(one), tokenizer, context)
        )
    if recipe.mode.is_online:
        to_generate = buffer(recipe.data.rl, prompts)
    if recipe.mode is Mode.OFFLINE_RL:
        finished = buffer(
            recipe.data.rl, lambda one: examples.prepare_finished_groups(answered(one), tokenizer, context)
        )
    if recipe.mode in (Mode.DPO, Mode.REWARD_MODEL):
        make = prepare_pairs if recipe.mode is Mode.DPO else prepare_scored_pairs
        pairs = buffer(recipe.data.preferences, lambda one: make(rows(one.path), one, tokenizer, context))
    return Prepared(
        tokenizer=tokenizer,
        conversations=conversations,
        prompts=to_generate,
        finished=finished,
        pairs=pairs,
        evaluation=evaluation,
        chat=(is_chat if pairs is None else pairs_are_chats)(rows(newest.path)[0], newest),
        system_prompt=newest.system_prompt,
    )


def _reader(recipe: RecipeSpec, manifest_dir: Path) -> Callable[[str], list[DataRow]]:
    """Reads a file that the recipe names, once; it raises InvalidData."""
    sources = {one.path: one for one in recipe.sources if one.is_rows}
    return cache(lambda path: read_rows(local_path(sources[path], manifest_dir)))


def _newest_data(recipe: RecipeSpec) -> list[DatasetSpec]:
    match recipe.mode:
        case Mode.SFT:
            return recipe.data.sft
        case Mode.DPO | Mode.REWARD_MODEL:
            return recipe.data.preferences
        case _:
            return recipe.data.rl


def tokenizer_of(recipe: RecipeSpec, manifest_dir: Path) -> Tokenizer:
    """The manifest's tokenizer. Raises InvalidData."""
    return load_tokenizer(recipe.model.tokenizer, model_folder(recipe.model, manifest_dir), manifest_dir)


def stop_token_ids(recipe: RecipeSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends a turn: the manifest's, and all that the model may have learned to end with."""
    holding = [token for text in recipe.sampling.stop for token in tokenizer.ids_holding(text)]
    return tuple(sorted({*tokenizer.end_ids, *recipe.sampling.stop_token_ids, *holding}))


def spelled_stops(recipe: RecipeSpec) -> tuple[str, ...]:
    """Stop strings that several tokens can make up: all that are longer than one byte."""
    return tuple(text for text in recipe.sampling.stop if len(text.encode()) > 1)


def stop_files(recipe: RecipeSpec, tokenizer: Tokenizer) -> dict[str, bytes]:
    """What agents read such strings by, beside the weights; file name to content. Raises InvalidData."""
    if not spelled_stops(recipe):
        return {}
    with TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise InvalidData(
                f"recipe.sampling.stop: this tokenizer cannot be written as {TOKENIZER_FILE}, by which engines find "
                "strings of several tokens; name tokens, in recipe.sampling.stopTokenIds"
            )
        return {TOKENIZER_FILE: path.read_bytes()}


def check_vocabulary(tokenizer: Tokenizer, model_vocabulary: int) -> None:
    """Raises InvalidData when the tokenizer can produce ids that the model has no embedding for."""
    if tokenizer.vocabulary > model_vocabulary:
        raise InvalidData(
            f"the tokenizer has {tokenizer.vocabulary} tokens, the model's vocab_size is {model_vocabulary}; "
            "recipe.model.config.vocab_size must be at least the tokenizer's"
        )


def context_fault(config: Mapping[str, Any], context: int) -> str:
    """Why `rollout.engine.maxContext` may not be `context` with the model of this config; empty: it may. Positions that
    are computed go on beyond what the config names."""
    kind, positions = config.get("model_type"), config.get("n_positions", config.get("max_position_embeddings"))
    if kind not in POSITION_TABLES or not isinstance(positions, int) or context <= positions:
        return ""
    return f"{context} is more than the {positions} positions that the model has, a {kind}: take {positions} at most"


def model_source(recipe: RecipeSpec, manifest_dir: Path) -> Path | dict[str, Any]:
    """The manifest's model: a folder, or the fields of a config. Raises InvalidData when it names neither."""
    folder = model_folder(recipe.model, manifest_dir)
    if folder is not None:
        return folder
    if recipe.model.config is None:
        raise InvalidData("recipe.model: needs `path` or `config`")
    return recipe.model.config
