"""Reward, filter, environment, own loss and advantage: imported, their signatures read, the reward called on one row,
loss and advantage on a few tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from polyrl.errors import InvalidCode, InvalidData
from polyrl.manifest.job import JobSpec
from polyrl.manifest.parts.algorithm import AlgorithmSpec, GroupFilter
from polyrl.manifest.parts.user_code import RewardSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import Finish, sample_id
from polyrl.wire.checks import (
    RESPONSE_FLAG,
    CheckBegan,
    CheckedField,
    CheckFault,
    CheckMessage,
    CheckSkipped,
    RewardTried,
)
from polyrl_trainer.check.rows import RECIPE, tokenizer_is_here, without_tokenizer
from polyrl_trainer.data.columns import prompt_rows
from polyrl_trainer.data.examples import Prompt, prepare_prompts
from polyrl_trainer.data.hub import cached_path
from polyrl_trainer.data.rows import DataRow, rows_or_faults
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.preparation import tokenizer_of
from polyrl_trainer.sample import Sample, shown_metrics
from polyrl_trainer.user_code.loading import load_environment, load_function
from polyrl_trainer.user_code.pools import UserPools
from polyrl_trainer.user_code.rewards import Failures
from polyrl_trainer.user_code.verdicts import Unscored

REWARD: Final[CheckedField] = (*RECIPE, "reward", "function")
ANSWERS: Final = ("response", "answer")
"""Fields of a row that hold, by custom, what the policy should write: the first that is text stands in for it."""


def check_code(recipe: RecipeSpec, manifest_dir: Path) -> Iterator[CheckMessage]:
    """Everything that the manifest names is imported, whatever the mode calls."""
    folder = manifest_dir / recipe.code.path
    if not folder.is_dir():
        return  # on the machine that trains; a missing one is reported where files are named
    named: list[tuple[CheckedField, str, Callable[[], Any]]] = []
    named += [(field, name, partial(load_function, name, folder)) for field, name in _rewards(recipe)]
    if recipe.algorithm.group_filter is GroupFilter.CUSTOM and (function := recipe.algorithm.filter_function):
        field = (*RECIPE, "algorithm", "filterFunction")
        named.append((field, function, lambda: load_function(function, folder)))
    of_a_row = partial(_metadata, recipe, manifest_dir)
    for name, own in (
        ("lossFunction", recipe.algorithm.loss_function),
        ("advantageFunction", recipe.algorithm.advantage_function),
    ):
        if own is not None:
            alone = AlgorithmSpec.model_validate({name: own})
            named.append(((*RECIPE, "algorithm", name), own, partial(_try_own, alone, folder, of_a_row)))
    if (environment := recipe.environment) is not None:
        field = (*RECIPE, "environment", "classPath")
        named.append((field, environment.class_path, lambda: load_environment(environment.class_path, folder)))
    for field, name, load in named:
        yield CheckBegan(field, f"importing {name}")
        try:
            with suppress(InvalidData):  # which the check of rows reports
                load()
        except InvalidCode as error:
            yield CheckFault(field, str(error))
        except ModuleNotFoundError as error:
            yield CheckSkipped(name, error.name or str(error))


def _rewards(recipe: RecipeSpec) -> Iterator[tuple[CheckedField, str]]:
    if recipe.reward is not None:
        yield REWARD, recipe.reward.function
    for index, one in enumerate(recipe.evaluation.sets):
        if one.reward is not None:
            yield (*RECIPE, "evaluation", "sets", index, "reward", "function"), one.reward.function


def _try_own(algorithm: AlgorithmSpec, folder: Path, metadata: Callable[[], dict[str, Any] | None]) -> None:
    """Imported here alone, because it takes torch, which other user code can do without. Where no row is here, nobody
    knows what an advantage would find in one, and it is not called."""
    from polyrl_trainer.user_code.own_algorithm import load_own, try_own

    own, found = load_own(algorithm, folder), metadata()
    try_own(own if found is not None else replace(own, advantage=None), algorithm, found)


def _metadata(recipe: RecipeSpec, manifest_dir: Path) -> dict[str, Any] | None:
    """What a sample of the first row has beside its texts."""
    sources = {one.path: one for one in recipe.sources if one.is_rows}
    for dataset in recipe.data.rl[:1]:
        file = cached_path(sources[dataset.path], manifest_dir)
        row = next(rows_or_faults(file), None) if file is not None and file.is_file() else None
        if isinstance(row, DataRow):
            return {name: value for name, value in row.fields.items() if name not in ("prompt", "messages")}
    return None


async def try_reward(
    spec: JobSpec, manifest_dir: Path, number: int = 1, response: str | None = None
) -> CheckMessage | None:
    """Calls the reward on row `number`, counted from 1, of the first file of prompts; `response` stands in for what the
    policy will write. None when there is no such row here. Raises InvalidData for a row or response that cannot be
    used."""
    recipe = spec.recipe
    folder = manifest_dir / recipe.code.path
    if recipe.reward is None or not folder.is_dir():
        return None
    try:
        if not tokenizer_is_here(recipe, manifest_dir):
            return without_tokenizer(recipe)
        found = _prompt(spec, manifest_dir, number)
        if found is None:
            return None
        prompt, tokenizer = found
        try:
            sample = sample_of(prompt, tokenizer, response)
        except InvalidData as error:
            return CheckFault(RESPONSE_FLAG, str(error))  # what stands in for it is never refused
    except ModuleNotFoundError as error:
        return CheckSkipped("the reward on a row", error.name or str(error))
    return await _call(recipe, manifest_dir, recipe.reward, sample, prompt.place)


async def _call(
    recipe: RecipeSpec, manifest_dir: Path, reward: RewardSpec, sample: Sample, place: str
) -> RewardTried | CheckFault:
    with closing(UserPools.start(_one_worker(recipe, reward), manifest_dir)) as pools:
        try:
            await pools.ready()
        except InvalidCode as error:
            return CheckFault(REWARD, str(error))
        function, n = pools.reward_function(reward, Failures({}, {})), 1
        if pools.scores_groups:  # which may need more than one to compare
            n = recipe.sampling.samples_per_prompt
        began = time.perf_counter()
        siblings = [replace(sample, id=sample_id(sample.group, number)) for number in range(n)]
        verdict, *_ = await asyncio.gather(*(function.score(one, n) for one in siblings))
        seconds = time.perf_counter() - began
    tried = RewardTried(place=place, prompt=sample.prompt, response=sample.response, seconds=seconds)
    if isinstance(verdict, Unscored):
        return _with(tried, refusal=verdict.detail)
    return _with(tried, reward=verdict.value, metrics=shown_metrics(verdict.metrics))


def _one_worker(recipe: RecipeSpec, reward: RewardSpec) -> RecipeSpec:
    """Without a filter, which is called with whole groups only, without an environment and other rewards."""
    algorithm = recipe.algorithm.model_copy(update={"group_filter": GroupFilter.NONE})
    evaluation = recipe.evaluation.model_copy(update={"sets": []})
    changes = {"reward": reward.model_copy(update={"workers": 1}), "algorithm": algorithm, "evaluation": evaluation}
    return recipe.model_copy(update={**changes, "environment": None})


def _with(tried: RewardTried, **changes: Any) -> RewardTried:
    return msgspec.structs.replace(tried, **changes)


def _prompt(spec: JobSpec, manifest_dir: Path, number: int) -> tuple[Prompt, Tokenizer] | None:
    recipe = spec.recipe
    generates = recipe.mode.is_online
    sources = {one.path: one for one in recipe.sources if one.is_rows}
    for dataset in [*(recipe.data.rl if generates else ()), *recipe.data.eval]:
        file = cached_path(sources[dataset.path], manifest_dir)
        if file is None or not file.is_file():
            continue
        row = next(islice(rows_or_faults(file), number - 1, None), None)
        if row is None:
            return None
        if isinstance(row, InvalidData):
            raise row
        tokenizer = tokenizer_of(recipe, manifest_dir)
        room = spec.rollout.engine.max_context - recipe.sampling.max_new_tokens
        return prepare_prompts(prompt_rows([row], dataset), tokenizer, room)[0], tokenizer
    return None


def sample_of(prompt: Prompt, tokenizer: Tokenizer, response: str | None) -> Sample:
    """A finished sample as the reward function gets it. Raises InvalidData when `response` cannot be encoded."""
    text, ids = _response(prompt, tokenizer) if response is None else (response, tokenizer.encode_text(response))
    ids = [*ids, tokenizer.eos_id]
    mask = np.concatenate([np.zeros(len(prompt.ids)), np.ones(len(ids))]).astype(np.float32)
    return Sample(
        tokens=np.asarray([*prompt.ids, *ids], dtype=np.int64),
        loss_mask=mask,
        prompt_length=len(prompt.ids),
        id="0.0",
        group=0,
        prompt=prompt.text,
        response=text,
        finish_reason=Finish.STOP.value,
        rollout_log_probs=np.zeros(len(mask), dtype=np.float32),
        versions=(0,),
        metadata=prompt.metadata,
    )


def _response(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """What stands in for the policy's: the row's own answer, else the prompt once more."""
    for text in (*(prompt.metadata.get(name) for name in ANSWERS), prompt.text):
        if isinstance(text, str):
            try:
                return text, tokenizer.encode_text(text)
            except InvalidData:
                continue
    return "", []
