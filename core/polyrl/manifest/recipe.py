"""`spec.recipe`: what is learned, from what, by which algorithm. Nothing in it knows where it runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from polyrl.manifest.base import (
    BELOW,
    BY_VALUE,
    CLUSTER_ONLY,
    HOST,
    INT32_MAX,
    Count,
    ManifestModel,
    Name,
    Place,
    Positive,
)
from polyrl.manifest.data import DataSpec, EvaluationSpec, named_rows
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.parts.optimizer import OptimizerSpec
from polyrl.manifest.parts.preferences import DpoSpec, RewardModelSpec
from polyrl.manifest.parts.sources import Source
from polyrl.manifest.parts.user_code import CodeSpec, EnvironmentSpec, EnvironmentVariable, RewardSpec

MODEL_CONFIG_SCHEMA: Final = {
    "type": "object",
    "required": ["model_type"],
    "properties": {"model_type": {"type": "string", "minLength": 1, "maxLength": 64}},
    "x-kubernetes-preserve-unknown-fields": True,
}
"""What is declared of a transformers config; its other fields belong to the model."""


def _named_model_type(config: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ValueError("needs model_type, the name of a transformers architecture such as qwen2")
    return config


ModelConfig = Annotated[dict[str, Any], AfterValidator(_named_model_type), WithJsonSchema(MODEL_CONFIG_SCHEMA)]


TEMPLATE_KWARGS_SCHEMA: Final = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


TemplateKwargs = Annotated[dict[str, Any], WithJsonSchema(TEMPLATE_KWARGS_SCHEMA)]


class Mode(StrEnum):
    """Which stages run, in order."""

    SFT = "sft"
    """Supervised fine-tuning only; no engine runs."""
    RL = "rl"
    """Reinforcement learning only."""
    SFT_RL = "sft+rl"
    """Supervised fine-tuning, then reinforcement learning from its result."""
    OFFLINE_RL = "offline-rl"
    """RL on a file of finished, scored samples; no engine runs."""
    DPO = "dpo"
    """Direct preference optimization on pairs of answers; engines run to evaluate only."""
    REWARD_MODEL = "reward-model"
    """A model of rewards from pairs of answers; no engine runs."""

    @property
    def is_online(self) -> bool:
        """True when the policy itself writes what it learns from, so that engines generate while it trains."""
        return self in (Mode.RL, Mode.SFT_RL)

    @property
    def has_rl(self) -> bool:
        """True when a stage learns from rewards, on-line or from a file."""
        return self.is_online or self is Mode.OFFLINE_RL

    @property
    def has_sft(self) -> bool:
        """True when a stage learns from examples."""
        return self in (Mode.SFT, Mode.SFT_RL)


class TokenizerSpec(ManifestModel):
    """How text becomes tokens."""

    type: Literal["characters", "huggingface"] = "huggingface"
    """`huggingface` reads a tokenizer's folder; `characters`
    maps each character of `alphabet` to one token, after <pad>=0, <bos>=1 and <eos>=2."""
    alphabet: Annotated[str, Field(max_length=1024)] = ""
    """Characters known to `characters`, each once."""
    path: Place | None = None
    """Folder of a Hugging Face tokenizer; default: the model's own folder."""
    chat_template_kwargs: TemplateKwargs | None = None
    """What the chat template reads beside the messages, such as `{enable_thinking: false}`; the template of every
    checkpoint has it set, so whoever serves the model makes the same prompts."""


class LoraSpec(ManifestModel):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): the model itself stays as it is, and what is learned
    is a product of two thin matrices beside each of its linear layers."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Width of the thin matrices; memory of the optimizer is in proportion to it."""
    alpha: Annotated[float, Field(gt=0, le=65_536)] = 32.0
    """The product is multiplied by alpha / rank."""
    target_modules: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(default=[], max_length=64)
    """Last names of the linear layers that get an adapter, such as q_proj; default: all but the head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that a training pass leaves out. Only in modes where no engine generates: engines
    compute without."""
    save_merged: bool = True
    """Checkpoints hold the whole model, adapters merged into it, beside the adapters; with false the adapters alone,
    and whoever loads them needs the model that the run began with."""


class ModelSpec(ManifestModel):
    """The policy: a Hugging Face folder, or a fresh one made from a config."""

    path: Place | None = None
    """Folder with config.json and safetensors, relative to the manifest; or, where there is no such folder, OWNER/NAME
    of a model on a Hub, downloaded when the run starts (HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE count). Or
    hf://OWNER/NAME@REVISION, s3://BUCKET/PLACE, gs://BUCKET/PLACE, file:///PLACE, and on a cluster pvc://CLAIM/PLACE,
    which is mounted."""
    secret_ref: Annotated[Name, CLUSTER_ONLY] | None = None
    """Secret in the job's namespace whose keys are variables of what fetches the model, such as HF_TOKEN or
    AWS_SECRET_ACCESS_KEY, and of nothing else."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a Hub's model; default: its main branch. A commit makes the run repeatable."""
    config: ModelConfig | None = None
    """Fields of a transformers config, `model_type` among them: a model with random weights, drawn from
    `recipe.seed`."""
    tokenizer: TokenizerSpec = TokenizerSpec()
    """How text becomes tokens."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the weights that engines serve and of the learner's forward pass."""
    lora: LoraSpec | None = None
    """Learn adapters instead of the whole model; `lora: {}` takes every default. Learning rates are about ten times
    those of the whole model."""

    @property
    def source(self) -> Source | None:
        """Where it is; None for one made from a config."""
        return None if self.path is None else Source("recipe.model.path", self.path, revision=self.revision)


class SftSpec(ManifestModel):
    """Supervised stage: cross-entropy on response tokens."""

    steps: Count = 0
    """Optimizer steps; 0 with modes that have no supervised stage."""
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = 32
    """Sequences per optimizer step."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule."""


class SamplingSpec(ManifestModel):
    """How the policy is sampled; names as in SGLang."""

    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 8
    """n of a group."""
    max_new_tokens: Annotated[int, Field(ge=1, le=16_777_216)] = 1024
    """Tokens generated for one sample at most, over all its turns; must leave room for a prompt in
    `rollout.engine.maxContext`."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Divides the logits; 1 samples the policy as it is, which is what the policy gradient assumes."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together reach this probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = -1
    """Draw from this many likeliest tokens; -1 keeps all."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default=[], max_length=16)
    """Strings that end a turn, with the token that completes one; all its tokens are kept. Where several tokens may
    spell one the tokenizer travels with the weights, and the agent beside each engine reads what it writes and ends it
    there."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field(default=[], max_length=256)
    """Token ids that end a turn, beside those that the tokenizer, its chat template and the model's generation config
    name. The token is kept."""


StoreUri = Annotated[
    str, Field(min_length=6, max_length=1024, pattern=rf"^(s3|gs|file|memory)://({HOST}+({BELOW})?|{BELOW})$")
]
"""Without credentials: a manifest is no place for them."""


class CheckpointSpec(ManifestModel):
    """What survives the trainer."""

    every_steps: Positive = 20
    """Optimizer steps (SFT) or RL steps between checkpoints; stages always end with one."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Newest checkpoints kept, one in the middle of a step until the next save; stage-final ones are kept besides."""
    uri: StoreUri | None = None
    """Where checkpoints are kept besides, in a folder of each run: s3://BUCKET/PLACE, gs://BUCKET/PLACE, or file:///PLACE
    of a mounted store. One counts as saved when it is there, whole; a trainer whose own disk is gone goes on from the
    newest there, and `keep` holds there too. Credentials by environment variables, from `recipe.envSecret`."""
    beside_steps: bool = True
    """A step waits for a copy of the learner's state, which is written beside the next steps; it takes 12 bytes of main
    memory for each parameter that learns. With false the step waits for the disk."""


class SampleLogSpec(ManifestModel):
    """What is kept of what the model wrote, as text: samples.jsonl in the run's folder."""

    per_step: Annotated[int, Field(ge=0, le=65_536)] = 10
    """Training samples of each RL step: the best, the worst, and groups that are drawn, whole, as many as there is room
    for; 0 keeps none."""
    evaluation: bool = True
    """Keep every sample of each evaluation."""
    max_chars: Annotated[int, Field(ge=16, le=16_777_216)] = 8000
    """Characters of one prompt or response; of a longer one the middle is left out."""
    max_bytes: Annotated[int, Field(ge=65_536, le=2**40)] = 64 * 2**20
    """Size of the file at which every second step of it is dropped, the newest kept; one step or evaluation takes a
    quarter of it at most."""


ShownName = Annotated[str, Field(min_length=1, max_length=128)]
"""A name on a page of somebody else's."""


class WandbSpec(ManifestModel):
    """Weights & Biases; needs `polyrl[wandb]`. The key is WANDB_API_KEY of the environment, never in a manifest."""

    project: ShownName | None = None
    """Default: WANDB_PROJECT, else `polyrl`."""
    entity: ShownName | None = None
    """User or team; default: WANDB_ENTITY, else the key's own."""
    name: ShownName | None = None
    """Name of the run there; default: the name of the run's folder, on a cluster the job's."""
    group: ShownName | None = None
    """Runs that are shown together; default: the job's name."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(default=[], max_length=64)
    """Shown beside the run."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to the folder `wandb` of the run, for `wandb sync` later; default: WANDB_MODE, else online."""


class MlflowSpec(ManifestModel):
    """MLflow's tracking; needs `polyrl[mlflow]`. Accounts come from the environment (MLFLOW_TRACKING_TOKEN...)."""

    tracking_uri: Annotated[str, Field(max_length=1024, pattern=r"^[a-z][a-z0-9+.-]*:[^@?#]+$")] | None = None
    """Such as http://mlflow:5000, without a password; default: MLFLOW_TRACKING_URI, else the run's folder `mlruns`. A
    database (sqlite:...) needs the whole of MLflow (pip install mlflow)."""
    experiment: ShownName | None = None
    """Made if there is none; default: MLFLOW_EXPERIMENT_NAME, else the job's name."""
    run_name: ShownName | None = None
    """Default: the name of the run's folder, on a cluster the job's."""


class LoggingSpec(ManifestModel):
    """Where metrics and samples go; metrics.jsonl is always written."""

    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl, a few samples as text among them."""
    wandb: WandbSpec | None = None
    """Send the same to Weights & Biases, samples as a table; `wandb: {}` takes every default."""
    mlflow: MlflowSpec | None = None
    """Send the same to MLflow, without samples; `mlflow: {}` takes every default."""
    samples: SampleLogSpec = SampleLogSpec()
    """What is kept of what the model wrote."""


class ActivationCheckpointing(StrEnum):
    """What a pass keeps of a layer for its backward pass; bits are the same."""

    NONE = "none"
    """All of it."""
    SELECTIVE = "selective"
    """Its input, what its attention gives, and every second of its matrix products; the rest, which is cheap but for
    the other products, is computed again."""
    FULL = "full"
    """Its input alone; all is computed again."""


class RecipeSpec(ManifestModel):
    """What is learned."""

    mode: Annotated[Mode, BY_VALUE] = Mode.RL
    """Which stages run: supervised, reinforcement, both in this order, reinforcement on a file of finished samples, or
    learning from pairs of answers, by the policy or by a reward model."""
    seed: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """Seeds model weights, data order and sampling; printed by every run."""
    code: CodeSpec = CodeSpec()
    """Where the user's Python lives."""
    env: list[EnvironmentVariable] = Field(default=[], max_length=64)
    """Environment of reward, filter and environment, beside what they have without being named: `HF_*`, `WANDB_*`,
    `MLFLOW_*`, `*_API_KEY`, `*_BASE_URL`, and the variables of proxies and certificates."""
    env_secret: Annotated[Name, CLUSTER_ONLY] | None = None
    """Secret in the job's namespace; each of its keys becomes a variable of the trainer's environment."""
    model: ModelSpec
    """The policy."""
    data: DataSpec = DataSpec()
    """Rows for each stage."""
    sft: SftSpec = SftSpec()
    """The supervised stage."""
    dpo: DpoSpec = DpoSpec()
    """The stage of mode `dpo`."""
    reward_model: RewardModelSpec = RewardModelSpec()
    """The stage of mode `reward-model`."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """The RL stage."""
    sampling: SamplingSpec = SamplingSpec()
    """How the policy is sampled."""
    reward: RewardSpec | None = None
    """The user's reward function; needed by the modes that sample."""
    environment: EnvironmentSpec | None = None
    """For multi-turn episodes with tools."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """When, how and on what the policy is evaluated; `data.eval` unless further sets are named."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """What survives the trainer."""
    logging: LoggingSpec = LoggingSpec()
    """Where metrics and samples go."""
    max_tokens_per_micro_batch: Positive = 16384
    """Token budget of one forward-backward pass; sequences are packed into it."""
    activation_checkpointing: Annotated[ActivationCheckpointing, BY_VALUE] = ActivationCheckpointing.NONE
    """What a pass keeps of each layer; what it does not keep it computes again in its backward pass. `full` takes a
    small part of the memory, for a third more operations; `selective` a third of it, for an eighth more."""
    compile: bool = False
    """Layers run as torch.compile makes them, by its inductor: its first pass waits for that, a minute or more, and the
    machine needs a compiler."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The model, if it is somewhere, and the files of rows; each place once, as it is first named."""
        model = self.model.source
        rows = [Source(_text(field), one.path, is_rows=True) for field, one in named_rows(self.data, self.evaluation)]
        first = {one.path: one for one in reversed(rows)}
        return (*(() if model is None else (model,)), *(one for one in rows if first[one.path] is one))

    @property
    def fetchable(self) -> tuple[Source, ...]:
        """Sources that may have to be fetched."""
        return tuple(one for one in self.sources if one.may_be_fetched)


def _text(field: tuple[str | int, ...]) -> str:
    return "recipe" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in field)
