"""`spec.recipe`: what is learned, from what, by which algorithm. Nothing in it knows where it runs.

Refuses to hold: capacity, pods, prices (see `rollout`, `trainer`, `scaling`). Read next: `job`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from polyrl.manifest.base import Spec


class Mode(StrEnum):
    """Which stages run, in order."""

    SFT = "sft"
    RL = "rl"
    SFT_RL = "sft+rl"
    OFFLINE_RL = "offline-rl"
    """RL on a file of finished, scored samples; no engine runs."""


class Code(Spec):
    """Where the user's Python lives; one of the three, and the same names work on a laptop and on a cluster."""

    path: str = "."
    """Folder put on the trainer's import path, relative to the manifest; on a cluster the mount point of the ConfigMap or
    volume, or a folder of the image."""
    config_map: str | None = None
    """ConfigMap whose keys are the files of that folder (cluster only; kustomize makes it from the files beside job.yaml)."""
    volume_claim: str | None = None
    """PersistentVolumeClaim mounted there, read-only (cluster only)."""


class Tokenizer(Spec):
    """How text becomes tokens."""

    type: Literal["characters", "huggingface"] = "huggingface"
    """`characters` maps each character of `alphabet` to one token, after <pad>=0, <bos>=1 and <eos>=2."""
    alphabet: str = ""
    """Characters known to `characters`, each once."""
    path: str | None = None
    """Folder of a Hugging Face tokenizer; default: the model's own folder."""


class ModelSource(Spec):
    """The policy: a Hugging Face folder, or a fresh one made from a config."""

    path: str | None = None
    """Folder with config.json and safetensors, relative to the manifest."""
    config: dict[str, Any] | None = None
    """Fields of a transformers config, `model_type` among them: a model with random weights, drawn from `recipe.seed`."""
    tokenizer: Tokenizer = Tokenizer()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the weights that engines serve and of the learner's forward pass."""


class Dataset(Spec):
    """One file of rows and its weight in the mixture."""

    path: str
    """JSONL or parquet, relative to the manifest. SFT rows: `prompt`, `response` or `messages`; RL rows: `prompt` or
    `messages`, and any further fields, which reach the reward function as `sample.metadata`."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Share of draws, relative to the other files' weights."""


class Data(Spec):
    """Rows for each stage; empty lists for the stages that do not run."""

    sft: list[Dataset] = Field(default=[], max_length=64)
    rl: list[Dataset] = Field(default=[], max_length=64)
    """Prompts for `rl`; finished samples for `offline-rl`."""
    eval: list[Dataset] = Field(default=[], max_length=64)
    """Prompts for evaluation; greedy, scored by the same reward function."""
    shuffle: bool = True


class Optimizer(Spec):
    """AdamW (Loshchilov and Hutter 2019) and its schedule."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global norm at which gradients are clipped."""


class Sft(Spec):
    """Supervised stage: cross-entropy on response tokens."""

    steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Sequences per optimizer step."""
    optimizer: Optimizer = Optimizer()


class Sampling(Spec):
    """How the policy is sampled; names as in SGLang."""

    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 8
    """n of a group."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 1024
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1


class GroupFilter(StrEnum):
    """Which complete groups may train."""

    NONE = "none"
    ANY_SUCCESS = "anySuccess"
    """At least one sample has reward > 0."""
    NONZERO_SPREAD = "nonzeroSpread"
    """Rewards are not all equal: groups without spread have no gradient (DAPO's dynamic sampling)."""
    CUSTOM = "custom"
    """`filterFunction` decides."""


class Algorithm(Spec):
    """The RL stage."""

    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimization (Shao et al. 2024, arXiv 2402.03300)."""
    steps: Annotated[int, Field(ge=0)] = 0
    """RL steps; one step consumes `promptsPerStep` groups and publishes one weight version."""
    prompts_per_step: Annotated[int, Field(ge=1)] = 32
    mini_batch_prompts: Annotated[int, Field(ge=1)] | None = None
    """Groups per optimizer step; must divide promptsPerStep; default: all of them, one optimizer step per RL step."""
    min_micro_batch_samples: Annotated[int, Field(ge=1)] = 16
    """Training starts as soon as this many samples of complete groups are scored, while the rest still generates."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """PPO ratio clip: [1 - clipLow, 1 + clipHigh]."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the reference model (the policy before RL); 0 keeps no reference."""
    normalize_advantage: bool = True
    """Divide group advantages by the group's standard deviation."""
    over_sampling_factor: Annotated[float, Field(ge=1, le=8)] = 1.0
    """Submit this many times promptsPerStep groups and train on the first complete ones that pass the filter."""
    group_filter: GroupFilter = GroupFilter.NONE
    filter_function: str | None = None
    """`module:function(samples) -> bool`, for groupFilter custom."""
    max_replaced_groups_per_step: Annotated[int, Field(ge=0)] | None = None
    """Prompts that may be replaced in one step because their groups were discarded; above it the run fails, loudly.
    Default: promptsPerStep."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Weight versions that a sample may be behind the learner; 0 is synchronous."""
    optimizer: Optimizer = Optimizer()


class Reward(Spec):
    """The one function the user writes: `def score(sample) -> float | dict`, sync or async."""

    function: str
    """`module:function`, importable from `code.path`."""
    timeout_seconds: Annotated[int, Field(ge=1)] = 30
    """A call that outlasts it discards its sample with reason rewardTimedOut."""
    max_concurrency: Annotated[int, Field(ge=1, le=4096)] = 32


class Environment(Spec):
    """A multi-turn episode: what is written between the policy's turns. Without it a sample is one turn."""

    class_path: str
    """`module:Class`, importable from `code.path`; its `async run(sample, generate)` plays one episode.
    `polyrl_trainer.environments.calculator:CalculatorEnvironment` ships."""
    max_turns: Annotated[int, Field(ge=1, le=1024)] = 8
    """Turns of the policy, after which the episode ends and is scored as it stands."""
    timeout_seconds: Annotated[int, Field(ge=1)] = 30
    """Time that the environment may take between two turns; beyond it the sample is discarded (environmentFailed)."""


class Evaluation(Spec):
    """Greedy evaluation on `data.eval`."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """RL steps between evaluations; 0 evaluates only before, between and after the stages."""
    max_samples: Annotated[int, Field(ge=1)] = 256


class Checkpoint(Spec):
    """What survives the trainer."""

    every_steps: Annotated[int, Field(ge=1)] = 20
    """Optimizer steps (SFT) or RL steps between checkpoints; stages always end with one."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept; stage-final ones are kept besides."""


class Logging(Spec):
    """Where metrics go; metrics.jsonl is always written."""

    tensorboard: bool = True


class Recipe(Spec):
    """What is learned."""

    mode: Mode = Mode.RL
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seeds model weights, data order and sampling; printed by every run."""
    code: Code = Code()
    model: ModelSource
    data: Data = Data()
    sft: Sft = Sft()
    algorithm: Algorithm = Algorithm()
    sampling: Sampling = Sampling()
    reward: Reward | None = None
    """Needed by the modes that sample."""
    environment: Environment | None = None
    """For multi-turn episodes with tools."""
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 16384
    """Token budget of one forward-backward pass; sequences are packed into it."""
