"""The tokenizer, all rows, and the model's sizes: every fault with its file and line, a few per file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from polyrl.errors import InvalidData
from polyrl.manifest.data import DatasetSpec, evaluated_rows
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import Mode, RecipeSpec
from polyrl.wire.checks import CheckBegan, CheckedField, CheckFault, CheckMessage, CheckNote, CheckSkipped, CheckUnmade
from polyrl_trainer.check.unknown_tokenizer import UnknownTokenizer
from polyrl_trainer.data import examples
from polyrl_trainer.data.columns import answered_rows, prompt_rows
from polyrl_trainer.data.hub import cached_folder, cached_path
from polyrl_trainer.data.preferences import prepare_pairs, prepare_scored_pairs
from polyrl_trainer.data.rows import DataRow, rows_or_faults
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.preparation import context_fault, tokenizer_of

RECIPE: Final[CheckedField] = ("spec", "recipe")
CONTEXT: Final[CheckedField] = ("spec", "rollout", "engine", "maxContext")
FAULTS_PER_FILE: Final = 5
"""Shown of one file; a column that is missing is missing in every row."""

Prepare = Callable[[list[DataRow]], Any]
PrepareDataset = Callable[[list[DataRow], DatasetSpec], Any]


def check_data(spec: JobSpec, manifest_dir: Path) -> Iterator[CheckMessage]:
    """The tokenizer, then every file that is there, as far as that goes without the tokenizer too; vocabulary and
    context are compared with the model's where those are known."""
    recipe = spec.recipe
    yield CheckBegan((*RECIPE, "model", "tokenizer"), "reading the tokenizer")
    try:
        is_here = tokenizer_is_here(recipe, manifest_dir)
        tokenizer = tokenizer_of(recipe, manifest_dir) if is_here else UnknownTokenizer()
    except ModuleNotFoundError as error:
        yield CheckSkipped("tokenizer and rows", error.name or str(error))
        return
    except InvalidData as error:
        yield CheckFault((*RECIPE, "model", "tokenizer"), str(error))
        return
    if is_here:
        yield from _model_faults(spec, manifest_dir, tokenizer)
    else:
        yield without_tokenizer(recipe)
    sources = {one.path: one for one in recipe.sources if one.is_rows}
    for place, datasets, prepare in _stages(spec, tokenizer):
        counts: dict[int, int] = {}
        for index, dataset in enumerate(datasets):
            file = cached_path(sources[dataset.path], manifest_dir)
            if file is None:
                yield CheckUnmade(f"{dataset.path}: not on this machine yet, so no row of it was looked at")
            elif file.is_file():
                field = (*RECIPE, *place, index, "path")
                yield CheckBegan(field, f"reading the rows of {file}")
                messages = list(_file_messages(file, field, partial(_counted, prepare, dataset, counts, index)))
                yield from messages
                if messages:
                    counts.pop(index, None)  # of rows one by one
        if place == ("data", "rl") and len(counts) == len(datasets):
            yield from _few(recipe, sum(n for index, n in counts.items() if datasets[index].weight))


def tokenizer_is_here(recipe: RecipeSpec, manifest_dir: Path) -> bool:
    """False when its folder is on another machine, or on none, which whoever names files reports."""
    tokenizer = recipe.model.tokenizer
    if tokenizer.type == "characters" or (tokenizer.path is None and recipe.model.path is None):
        return True
    folder = manifest_dir / tokenizer.path if tokenizer.path else cached_folder(recipe.model, manifest_dir)
    return folder is not None and folder.is_dir()


def without_tokenizer(recipe: RecipeSpec) -> CheckUnmade:
    """What is left out where the tokenizer is not here."""
    name = recipe.model.tokenizer.path or recipe.model.path
    here = f"{name}: not on this machine yet (a run downloads a Hub's model; `hf download {name}` does it now)"
    return CheckUnmade(f"{here}, so no length was looked at and the reward was not called")


def _stages(
    spec: JobSpec, tokenizer: Tokenizer
) -> Iterator[tuple[tuple[str | int, ...], Sequence[DatasetSpec], PrepareDataset]]:
    """Where the files that the mode reads are named below the recipe, and what makes of a row what is learned from
    it."""
    data, mode, context = spec.recipe.data, spec.recipe.mode, spec.rollout.engine.max_context
    length = spec.recipe.sampling.max_new_tokens

    def prompts(rows: list[DataRow], dataset: DatasetSpec, answer: int = length) -> Any:
        return examples.prepare_prompts(
            prompt_rows(rows, dataset), tokenizer, context - answer, max_skipped=data.max_long_prompts
        )

    def conversations(rows: list[DataRow], dataset: DatasetSpec) -> Any:
        return examples.prepare_conversations(answered_rows(rows, dataset), tokenizer, context)

    def finished(rows: list[DataRow], dataset: DatasetSpec) -> Any:
        return examples.prepare_finished_groups(answered_rows(rows, dataset), tokenizer, context)

    def pairs(rows: list[DataRow], dataset: DatasetSpec) -> Any:
        make = prepare_pairs if mode is Mode.DPO else prepare_scored_pairs
        return make(rows, dataset, tokenizer, context)

    if mode in (Mode.DPO, Mode.REWARD_MODEL):
        yield ("data", "preferences"), data.preferences, pairs
    if mode.has_sft:
        yield ("data", "sft"), data.sft, conversations
    if mode.is_online:
        yield ("data", "rl"), data.rl, prompts
    if mode is Mode.OFFLINE_RL:
        yield ("data", "rl"), data.rl, finished
    for rows in evaluated_rows(data, spec.recipe.evaluation):
        yield rows.field, rows.data, partial(prompts, answer=rows.sampling.max_new_tokens or length)


def _counted(
    prepare: PrepareDataset, dataset: DatasetSpec, counts: dict[int, int], index: int, rows: list[DataRow]
) -> Any:
    """Notes under `index` what was made of all rows of a file."""
    made = prepare(rows, dataset)
    counts[index] = len(made)
    return made


def _few(recipe: RecipeSpec, count: int) -> Iterator[CheckNote]:
    wanted, kind = recipe.algorithm.prompts_per_step, "groups" if recipe.mode is Mode.OFFLINE_RL else "prompts"
    if count < wanted:
        has = f"recipe.algorithm.promptsPerStep is {wanted}, and data.rl has {count} {kind}"
        yield CheckNote(f"{has}: each step takes some more than once")


def _file_messages(file: Path, field: CheckedField, prepare: Prepare) -> Iterator[CheckMessage]:
    try:
        faults = list(row_faults(file, prepare))
    except ModuleNotFoundError as error:
        yield CheckSkipped(f"the rows of {file}", error.name or str(error))
        return
    yield from (CheckFault(field, fault) for fault in faults[:FAULTS_PER_FILE])
    if len(faults) > FAULTS_PER_FILE:
        yield CheckFault(field, f"{file}: {len(faults) - FAULTS_PER_FILE} more rows are refused likewise")


def row_faults(file: Path, prepare: Prepare) -> Iterator[str]:
    """What is wrong with each row of a file, and with the rows together where they are all well one by one."""
    good: list[DataRow] = []
    refused = False
    try:
        for row in rows_or_faults(file):
            fault = row if isinstance(row, InvalidData) else None
            if isinstance(row, DataRow):
                good.append(row)
            else:
                refused = True
                yield str(fault)
    except InvalidData as error:
        yield str(error)
        return
    if not good and not refused:
        yield f"{file}: holds no rows"
    yield from _faults_of(good, prepare)


def _faults_of(rows: list[DataRow], prepare: Prepare) -> Iterator[str]:
    """All at once where nothing is wrong, which is the common case; else one by one, to name each."""
    try:
        prepare(rows)
    except InvalidData as whole:
        alone = list(_single_faults(rows, prepare))
        # Rows that are wrong only beside each other, as a group of one, have the fault of the whole.
        yield from alone or [str(whole)]


def _single_faults(rows: Iterable[DataRow], prepare: Prepare) -> Iterator[str]:
    for row in rows:
        try:
            # Twice: what needs company has it.
            prepare([row, row])
        except InvalidData as error:
            yield str(error)


def _model_faults(spec: JobSpec, manifest_dir: Path, tokenizer: Tokenizer) -> Iterator[CheckFault]:
    config: Any = spec.recipe.model.config
    place: CheckedField = (*RECIPE, "model", "config", "vocab_size")
    folder = cached_folder(spec.recipe.model, manifest_dir)
    if config is None and folder is not None:
        file, place = folder / "config.json", (*RECIPE, "model", "path")
        try:
            config = json.loads(file.read_bytes())
        except OSError:
            return  # reported where the file is named
        except ValueError as error:
            yield CheckFault(place, f"{file}: is not valid JSON: {error}")
            return
    size = model_vocabulary(config)
    if size is not None and size < tokenizer.vocabulary:
        yield CheckFault(
            place, f"the tokenizer has {tokenizer.vocabulary} tokens, the model's vocab_size is {size}; make it that"
        )
    if isinstance(config, dict) and (fault := context_fault(config, spec.rollout.engine.max_context)):
        yield CheckFault(CONTEXT, fault)


def model_vocabulary(config: object) -> int | None:
    """`vocab_size` of a model's config, also where the text part of a larger model holds it; None when not given."""
    if not isinstance(config, dict):
        return None
    size = config.get("vocab_size", None)
    return size if isinstance(size, int) else model_vocabulary(config.get("text_config"))
