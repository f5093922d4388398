"""`spec.recipe`: what is learned, from what, by which algorithm. Nothing in it knows where it runs."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from polyrl.manifest.base import (
    BY_VALUE,
    CLUSTER_ONLY,
    INT32_MAX,
    Count,
    FunctionName,
    ManifestModel,
    Name,
    PathText,
    Positive,
)
from polyrl.manifest.data import DataSpec, EvaluationSpec
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


class TokenizerSpec(ManifestModel):
    """How text becomes tokens."""

    type: Literal["characters", "huggingface"] = "huggingface"
    """`huggingface` reads a tokenizer's folder; `characters`
    maps each character of `alphabet` to one token, after <pad>=0, <bos>=1 and <eos>=2."""
    alphabet: Annotated[str, Field(max_length=1024)] = ""
    """Characters known to `characters`, each once."""
    path: PathText | None = None
    """Folder of a Hugging Face tokenizer; default: the model's own folder."""


HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
"""OWNER/NAME on a Hub."""


class ModelSpec(ManifestModel):
    """The policy: a Hugging Face folder, or a fresh one made from a config."""

    path: PathText | None = None
    """Folder with config.json and safetensors, relative to the manifest; or, where there is no such folder, OWNER/NAME
    of a model on a Hub, downloaded when the run starts (HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE count)."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a Hub's model; default: its main branch. A commit makes the run repeatable."""
    config: ModelConfig | None = None
    """Fields of a transformers config, `model_type` among them: a model with random weights, drawn from
    `recipe.seed`."""
    tokenizer: TokenizerSpec = TokenizerSpec()
    """How text becomes tokens."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the weights that engines serve and of the learner's forward pass."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(ManifestModel):
    """AdamW (Loshchilov and Hutter 2019) and its schedule."""

    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Peak step size. RL wants far less than SFT, and tiny models far more than large ones: 1e-6 suits billions of
    parameters."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course after the warm-up; cosine and linear fall to 0 at the stage's last step."""
    warmup_steps: Count = 0
    """Optimizer steps in which the rate rises linearly from 0."""
    betas: Annotated[tuple[Beta, Beta], BY_VALUE] = (0.9, 0.95)
    """Decay of the first and second moment; 0.95 forgets outliers sooner than AdamW's 0.999."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the second moment, against division by 0."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled decay of weights per step, times the learning rate."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Global norm at which gradients are clipped."""


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
    """Strings that end a response of one turn, with the token that completes one. Engines stop at a token that holds
    such a string; where several tokens make it up they go on to an end token or to maxNewTokens, and what comes after
    the string is left out."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field(default=[], max_length=256)
    """Token ids that end a turn, beside those that the tokenizer, its chat template and the model's generation config
    name. The token is kept."""


class GroupFilter(StrEnum):
    """Which complete groups may train."""

    NONE = "none"
    """Every complete group."""
    ANY_SUCCESS = "anySuccess"
    """At least one sample has reward > 0."""
    NONZERO_SPREAD = "nonzeroSpread"
    """Rewards are not all equal: groups without spread have no gradient (DAPO's dynamic sampling)."""
    CUSTOM = "custom"
    """`filterFunction` decides."""


class OldLogProbs(StrEnum):
    """What the clipped ratio compares the policy with."""

    BYPASS = "bypass"
    """What the engine reported when it drew the token. No further forward pass; the ratio holds the difference between
    engine and learner too."""
    REUSE = "reuse"
    """The policy itself: the ratio is 1, and `correction` accounts for the engine. One optimizer step per RL step."""
    RECOMPUTE = "recompute"
    """The learner's own before the step's first update, by one more forward pass; `correction` accounts for the engine
    (decoupled PPO, Hilton et al. 2021, arXiv 2110.00641)."""


class Correction(StrEnum):
    """How a token's loss is weighed by w, its probability under the old policy over that under the engine's."""

    NONE = "none"
    """Not at all."""
    TOKEN_TRUNCATE = "tokenTruncate"
    """By min(w, correctionHigh) of the token (truncated importance sampling)."""
    TOKEN_MASK = "tokenMask"
    """By w of the token within [correctionLow, correctionHigh], by 0 outside."""
    SEQUENCE_TRUNCATE = "sequenceTruncate"
    """By min(w, correctionHigh), w multiplied over the sample's tokens."""
    SEQUENCE_MASK = "sequenceMask"
    """By w, multiplied over the sample's tokens, within [correctionLow, correctionHigh], by 0 outside (masked
    importance sampling)."""


class AlgorithmName(StrEnum):
    """Published algorithms; each stands for a choice of `policyLoss`, `advantage`, `aggregation`, `clipLow` and
    `clipHigh`, of which any may be given otherwise."""

    GRPO = "grpo"
    """Clipped ratio, `groupNorm`, `sequenceMean`, 0.2 and 0.2 (Shao et al. 2024, arXiv 2402.03300)."""
    DR_GRPO = "dr-grpo"
    """The same with `groupMean` and `constant`: neither a group's spread nor a length weighs (Liu et al. 2025, arXiv
    2503.20783)."""
    DAPO = "dapo"
    """GRPO with `tokenMean`, 0.2 and 0.28 (Yu et al. 2025, arXiv 2503.14476). Its dynamic sampling is `groupFilter:
    nonzeroSpread`."""
    GSPO = "gspo"
    """GRPO with the ratio of whole sequences, 0.0003 and 0.0004 (Zheng et al. 2025, arXiv 2507.18071)."""
    CISPO = "cispo"
    """`groupNorm`, `tokenMean`, weights cut to 0 to 5, which is `clipLow` 1 and `clipHigh` 4 (MiniMax 2025, arXiv
    2506.13585)."""
    RLOO = "rloo"
    """Clipped ratio, `rloo`, `sequenceSum` (Ahmadian et al. 2024, arXiv 2402.14740); the ratio is a token's."""
    REINFORCE_PLUS_PLUS = "reinforce++"
    """Clipped ratio, `reinforce++`, `tokenMean`, with `oldLogProbs: recompute` (Hu 2025, arXiv 2501.03262)."""


class PolicyLoss(StrEnum):
    """What a token adds to the loss."""

    CLIP = "clip"
    """-min(r A, clip(r) A), r the token's ratio (PPO, Schulman et al. 2017, arXiv 1707.06347)."""
    GSPO = "gspo"
    """The same, r the geometric mean of a sequence's ratios."""
    CISPO = "cispo"
    """-clip(r) A log pi, where clip(r) is a weight without gradient: no token loses its own."""


class AdvantageEstimator(StrEnum):
    """What a sample's reward is compared with."""

    GROUP_NORM = "groupNorm"
    """The mean of its group, in standard deviations of the group."""
    GROUP_MEAN = "groupMean"
    """The mean of its group."""
    RLOO = "rloo"
    """The mean of the others of its group."""
    REINFORCE_PLUS_PLUS = "reinforce++"
    """All of the step: returns per token, in standard deviations of the step. Needs `oldLogProbs: recompute`, since
    training then waits for the whole step."""


class Aggregation(StrEnum):
    """How tokens add up to a mini-batch's loss."""

    SEQUENCE_MEAN = "sequenceMean"
    """Mean over samples of the mean over each one's tokens: short answers weigh as much as long ones."""
    TOKEN_MEAN = "tokenMean"
    """Mean over all tokens: long answers weigh more."""
    SEQUENCE_SUM = "sequenceSum"
    """Mean over samples of the sum over each one's tokens."""
    CONSTANT = "constant"
    """Sum over all tokens, divided by the samples times `sampling.maxNewTokens`: no length weighs."""


class KlPlace(StrEnum):
    """Where the KL penalty stands."""

    LOSS = "loss"
    """A term of the loss."""
    REWARD = "reward"
    """Taken from the reward, by k1 of each token; `klEstimator` does not count."""


class KlEstimator(StrEnum):
    """The KL penalty of a token in the loss; d = log pi - log piRef."""

    K1 = "k1"
    """d. Its gradient is 0 on average: it pulls nowhere, and is here to compare with."""
    K2 = "k2"
    """d^2 / 2: the gradient of KL(pi || piRef) on samples of pi."""
    K3 = "k3"
    """e^-d + d - 1, as often published. Its gradient is that of KL(piRef || pi): biased."""
    K3_RATIO = "k3Ratio"
    """k3 times the ratio, with the gradient of both: that of KL(pi || piRef), of lower variance than k2."""


class AlgorithmSpec(ManifestModel):
    """The RL stage."""

    name: Annotated[AlgorithmName, BY_VALUE] = AlgorithmName.GRPO
    """A published algorithm."""
    policy_loss: Annotated[PolicyLoss, BY_VALUE] | None = None
    """What a token adds to the loss. Default: by name."""
    advantage: Annotated[AdvantageEstimator, BY_VALUE] | None = None
    """What a sample's reward is compared with. Default: by name."""
    aggregation: Annotated[Aggregation, BY_VALUE] | None = None
    """How tokens add up to a mini-batch's loss. Default: by name."""
    steps: Count = 0
    """RL steps; one step consumes `promptsPerStep` groups and publishes one weight version."""
    prompts_per_step: Annotated[int, Field(ge=1, le=1_048_576)] = 32
    """Groups trained per RL step."""
    mini_batch_prompts: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Groups per optimizer step; must divide promptsPerStep; default: all of them, one optimizer step per RL step."""
    min_micro_batch_samples: Positive = 16
    """Training starts as soon as this many samples of complete groups are scored, while the rest still generates."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lower end of the ratio clip [1 - clipLow, 1 + clipHigh] (PPO). Default: by name, 0.2 mostly."""
    clip_high: Annotated[float, Field(gt=0, le=100)] | None = None
    """Upper end of the ratio clip; above clipLow it leaves rare tokens room to grow (DAPO's clip-higher). Default: by
    name, 0.2 mostly."""
    dual_clip: Annotated[float, Field(gt=1, le=1_000_000)] = 3.0
    """Largest ratio that counts where the advantage is negative (dual clip, Ye et al. 2019, arXiv 1912.09729): without
    it one token that has become likely outweighs all others."""
    old_log_probs: Annotated[OldLogProbs, BY_VALUE] = OldLogProbs.BYPASS
    """What the clipped ratio compares with. `bypass` suits one optimizer step per RL step or few, `recompute` several;
    with `recompute` mini-batches are drawn by seed once the step is generated, not in order of completion."""
    correction: Annotated[Correction, BY_VALUE] | None = None
    """How the difference between engine and learner is corrected. Default: `tokenTruncate` with `reuse` and
    `recompute`, `none` with `bypass`, whose ratio contains it; there the masks leave tokens out and weigh none."""
    correction_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lower bound of the masks."""
    correction_high: Annotated[float, Field(gt=1, le=1_000_000)] = 2.0
    """Upper bound of the weight."""
    kl_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the KL penalty to the reference model (the policy before RL); 0 keeps no reference."""
    kl_place: Annotated[KlPlace, BY_VALUE] = KlPlace.LOSS
    """Where the KL penalty stands."""
    kl_estimator: Annotated[KlEstimator, BY_VALUE] = KlEstimator.K3_RATIO
    """The KL penalty of a token, in the loss."""
    over_sampling_factor: Annotated[float, Field(ge=1, le=8)] = 1.0
    """Submit this many times promptsPerStep groups and train on the first complete ones that pass the filter."""
    group_filter: Annotated[GroupFilter, BY_VALUE] = GroupFilter.NONE
    """Which complete groups may train; the others are discarded as filtered, and other prompts take their place."""
    filter_function: FunctionName | None = None
    """`module:function(samples) -> bool`, for groupFilter custom."""
    max_replaced_groups_per_step: Count | None = None
    """Prompts that may be replaced in one step because their groups were lost or could not be scored; above it the run
    fails, loudly. Default: promptsPerStep."""
    max_filtered_groups_per_step: Count | None = None
    """Prompts that may be replaced in one step because their groups did not pass the filter: data that is too easy or
    too hard is no failure, but has an end. Default: 10 times promptsPerStep, as DAPO's."""
    overlong_filter: bool = False
    """Do not learn from samples that were cut at `sampling.maxNewTokens` or at the engines' context; they count in
    their group's mean."""
    overlong_buffer: Count = 0
    """Tokens before `sampling.maxNewTokens` from which on length costs reward, in proportion, to 1 at the limit (DAPO's
    soft overlong punishment, never more than 1); 0 punishes none. Filters and metrics see the reward without it."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Weight versions that a sample may be behind the learner; 0 is synchronous."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule."""


class CheckpointSpec(ManifestModel):
    """What survives the trainer."""

    every_steps: Positive = 20
    """Optimizer steps (SFT) or RL steps between checkpoints; stages always end with one."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Newest checkpoints kept; stage-final ones are kept besides."""


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
    """Of the run there; default: the name of the run's folder, on a cluster the job's."""
    group: ShownName | None = None
    """Runs that are shown together; default: the job's name."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(default=[], max_length=64)
    """Shown beside the run."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes to the folder `wandb` of the run, for `wandb sync` later; default: WANDB_MODE, else online."""


class MlflowSpec(ManifestModel):
    """MLflow's tracking; needs `polyrl[mlflow]`. Accounts come from the environment (MLFLOW_TRACKING_TOKEN...)."""

    tracking_uri: Annotated[str, Field(max_length=1024, pattern=r"^[a-z][a-z0-9+.-]*:[^@]+$")] | None = None
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


class RecipeSpec(ManifestModel):
    """What is learned."""

    mode: Annotated[Mode, BY_VALUE] = Mode.RL
    """Which stages run: supervised, reinforcement, both in this order, or reinforcement on a file of finished
    samples."""
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
