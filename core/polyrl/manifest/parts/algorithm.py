"""`spec.recipe.algorithm`: how rewards become updates; its choices by name, each with its source."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from polyrl.manifest.base import BY_VALUE, Count, FunctionName, ManifestModel, Positive
from polyrl.manifest.parts.critic import CriticSpec, CriticTrunk
from polyrl.manifest.parts.optimizer import OptimizerSpec


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
    PPO = "ppo"
    """Clipped ratio, `gae`, `tokenMean`, with `oldLogProbs: recompute` and a `critic` (Schulman et al. 2017, arXiv
    1707.06347)."""


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
    TURN_NORM = "turnNorm"
    """The mean of its group, turn by turn: what came of a turn by its environment's rewards and the reward at the end,
    in standard deviations of the group's samples at the same turn (MT-GRPO, Zeng et al. 2025, arXiv 2505.11821, with
    GiGPO's discounted return, Feng et al. 2025, arXiv 2505.10978). Needs `recipe.environment`."""
    REINFORCE_PLUS_PLUS = "reinforce++"
    """All of the step: returns per token, in standard deviations of the step. Needs `oldLogProbs: recompute`, since
    training then waits for the whole step."""
    GAE = "gae"
    """What a critic expected, token by token, in standard deviations of the step. Needs `oldLogProbs: recompute`
    likewise."""


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
    loss_function: FunctionName | None = None
    """`module:function(tokens) -> tensor`, your own in place of `policyLoss`: what each learned token adds to the loss.
    Runs in the trainer's process."""
    advantage_function: FunctionName | None = None
    """`module:function(samples) -> list`, your own in place of `advantage`: a number for each sample of a group."""
    turn_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """For advantage `turnNorm`: how much a turn is worth of what the next one is."""
    steps: Count = 0
    """RL steps; one step consumes `promptsPerStep` groups and publishes one weight version."""
    prompts_per_step: Annotated[int, Field(ge=1, le=1_048_576)] = 32
    """Groups trained per RL step."""
    mini_batch_prompts: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Groups per optimizer step; must divide promptsPerStep; default: all of them, one optimizer step per RL step."""
    update_epochs: Annotated[int, Field(ge=1, le=1024)] = 1
    """Passes over each RL step's samples; every pass draws mini-batches of its own by seed. Old logprobs are those of
    the step's start in all of them: the engine's with `bypass`, the learner's with `recompute`; not for `reuse`."""
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
    entropy_coefficient: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Weight of the entropy bonus in the loss: above 0 it keeps the policy from becoming sure too soon, and its
    gradient takes up to 512 MiB of the learner's memory."""
    over_sampling_factor: Annotated[float, Field(ge=1, le=8)] = 1.0
    """Choose among this many times promptsPerStep groups, rounded up: the first complete ones that pass the filter
    train. With maxStaleness above 0 all others train in the next step, and the factor is 2 at most; with 0 they are
    cancelled, so the longest answers of each step never train."""
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
    """Steps whose prompts are generated ahead of the one that trains, and weight versions that a sample's oldest token
    may be behind its step's own; 0 is synchronous."""
    critic: CriticSpec = CriticSpec()
    """The value function, where the advantage is `gae`, as that of `ppo` is."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """AdamW and its schedule."""

    @property
    def learns_from_turns(self) -> bool:
        """Whether the advantage is of what an environment gave for turns too, or may be."""
        return self.advantage is AdvantageEstimator.TURN_NORM or self.advantage_function is not None

    @property
    def uses_critic(self) -> bool:
        """Whether a value function learns beside the policy."""
        return self.advantage_function is None and (self.advantage or self.name).value in ("gae", "ppo")

    @property
    def shares_trunk(self) -> bool:
        """Whether the policy's trunk carries a value function too."""
        return self.uses_critic and self.critic.trunk is CriticTrunk.SHARED
