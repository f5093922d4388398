"""`spec.recipe.data` and `spec.recipe.evaluation`: files of rows for each stage and what their columns are called; when
and how the policy is evaluated on some of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from polyrl.manifest.base import CLUSTER_ONLY, INT32_MAX, Count, ManifestModel, Name, Place, Positive
from polyrl.manifest.parts.user_code import RewardSpec

PassReward = Annotated[float, Field(ge=-1e6, le=1e6)]
FieldName = Annotated[str, Field(min_length=1, max_length=256)]


class DatasetSpec(ManifestModel):
    """One file of rows and its weight in the mixture."""

    path: Place
    """JSONL (.jsonl, .jsonl.gz) or parquet, relative to the manifest; or hf://datasets/OWNER/NAME@REVISION/FILE,
    s3://BUCKET/FILE, gs://BUCKET/FILE, file:///FILE, fetched when the run starts. SFT rows: `prompt`, `response` or
    `messages`; RL rows: `prompt` or `messages`, and any further fields, which reach the reward function as
    `sample.metadata`. Pairs: `chosen` and `rejected` beside either, or whole conversations in both."""
    weight: Annotated[float, Field(ge=0, le=1_000_000)] = 1.0
    """Share of draws, relative to the other files' weights."""
    prompt_field: FieldName | None = None
    """The rows' own name of what is read as `prompt`, such as `question`; it counts before `messages`."""
    response_field: FieldName | None = None
    """The rows' own name of what is read as `response`, for SFT and `offline-rl`."""
    chat: bool = False
    """Take `prompt` through the tokenizer's chat template, as a user's message; rows with `messages` always are."""
    system_prompt: Annotated[str, Field(max_length=65_536)] = ""
    """Begins every conversation that does not begin with a system message; implies `chat`."""


class DataSpec(ManifestModel):
    """Rows for each stage; empty lists for the stages that do not run."""

    sft: list[DatasetSpec] = Field(default=[], max_length=64)
    """Prompts with responses, for `sft` and the first stage of `sft+rl`."""
    rl: list[DatasetSpec] = Field(default=[], max_length=64)
    """Prompts for `rl`; finished samples for `offline-rl`."""
    preferences: list[DatasetSpec] = Field(default=[], max_length=64)
    """Pairs of answers, one of which was preferred, for `dpo` and `reward-model`."""
    eval: list[DatasetSpec] = Field(default=[], max_length=64)
    """Prompts for evaluation, scored by the same reward function."""
    secret_ref: Annotated[Name, CLUSTER_ONLY] | None = None
    """Secret in the job's namespace whose keys are variables of what fetches rows and model, such as HF_TOKEN or
    AWS_SECRET_ACCESS_KEY, and of nothing else."""
    max_long_prompts: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of a file's rows that may be skipped, and are counted in the log, because their prompt leaves no room for a
    response in `rollout.engine.maxContext`; a file with more of them is refused."""
    shuffle: bool = True
    """Draw rows in an order that `recipe.seed` decides; false takes them as they stand."""


class EvaluationSampling(ManifestModel):
    """How each prompt is answered in an evaluation."""

    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Answers to each prompt; from two on, the shares of prompts that 1, 2, 4 ... of them solve are measured
    (pass@k)."""
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0 is greedy. Default: 0 with one sample per prompt, else 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together reach this probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = -1
    """Draw from this many likeliest tokens; -1 keeps all."""
    max_new_tokens: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Tokens generated for one sample at most. Default: `recipe.sampling.maxNewTokens`."""


class EvaluationSet(ManifestModel):
    """A further set of rows, measured apart: its numbers are `eval/NAME/...`."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the set, in metrics."""
    data: list[DatasetSpec] = Field(min_length=1, max_length=64)
    """Its files."""
    max_samples: Positive = 256
    """Rows evaluated, from the start of the files; the same ones every time."""
    sampling: EvaluationSampling | None = None
    """How its prompts are answered. Default: as those of `data.eval`."""
    reward: RewardSpec | None = None
    """The function that scores its answers. Default: `recipe.reward`."""
    pass_reward: PassReward | None = None
    """Default: with a reward of its own as if none were given, else `evaluation.passReward`."""


class EvaluationSpec(ManifestModel):
    """Evaluation on `data.eval` and on further sets."""

    every_steps: Count = 0
    """RL steps between evaluations; 0 evaluates only before, between and after the stages."""
    every_sft_steps: Count = 0
    """SFT steps between evaluations; 0 evaluates only before and after the stage."""
    max_samples: Positive = 256
    """Rows of `data.eval` evaluated, from the start of the files; the same ones every time."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How prompts are answered."""
    pass_reward: PassReward | None = None
    """For pass@k: an answer passes when its reward is at least this. Default: when the reward function names
    `exact_match` and it is above 0; where it names none, when the reward is at least 1."""
    sets: list[EvaluationSet] = Field(default=[], max_length=16)
    """Measured in addition to `data.eval`, which is the one that summaries show."""


@dataclass(frozen=True)
class EvaluatedRows:
    """One set of rows with all that the manifest says of it."""

    name: str
    """Empty: `data.eval`."""
    field: tuple[str | int, ...]
    """Where its files are named, below `recipe`."""
    data: list[DatasetSpec]
    max_samples: int
    sampling: EvaluationSampling
    reward: RewardSpec | None = None
    """Its own; None: the recipe's."""
    pass_reward: float | None = None


def evaluated_rows(data: DataSpec, spec: EvaluationSpec) -> Iterator[EvaluatedRows]:
    """All sets, `data.eval` first; none where that is empty."""
    if data.eval:
        yield EvaluatedRows(
            "",
            ("data", "eval"),
            data=data.eval,
            max_samples=spec.max_samples,
            sampling=spec.sampling,
            pass_reward=spec.pass_reward,
        )
    for index, one in enumerate(spec.sets):
        yield EvaluatedRows(
            one.name,
            ("evaluation", "sets", index, "data"),
            data=one.data,
            max_samples=one.max_samples,
            sampling=one.sampling or spec.sampling,
            reward=one.reward,
            pass_reward=spec.pass_reward if one.pass_reward is None and one.reward is None else one.pass_reward,
        )


def named_rows(data: DataSpec, spec: EvaluationSpec) -> Iterator[tuple[tuple[str | int, ...], DatasetSpec]]:
    """Every file of rows, with where its path is named below `recipe`."""
    learned = ((("data", "sft"), data.sft), (("data", "rl"), data.rl), (("data", "preferences"), data.preferences))
    evaluated = [(rows.field, rows.data) for rows in evaluated_rows(data, spec)]
    for field, files in (*learned, *evaluated):
        for index, one in enumerate(files):
            yield (*field, index, "path"), one
