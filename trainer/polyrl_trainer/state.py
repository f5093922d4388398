"""What a checkpoint holds besides the model, as one JSON value; changes when a step is whole, or is left half-way."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec


class TrainingStage(StrEnum):
    """What a checkpoint belongs to."""

    SFT = "sft"
    """Supervised fine-tuning on conversations."""
    RL = "rl"
    """Reinforcement learning on samples that engines generate."""
    OFFLINE_RL = "offline-rl"
    """Reinforcement learning on a file of scored samples."""
    DPO = "dpo"
    """Direct preference optimization on pairs of answers."""
    REWARD_MODEL = "reward-model"
    """A model of rewards, from pairs of answers."""


class Results(msgspec.Struct):
    """What the run has achieved so far; becomes trainer-result.json."""

    evaluations: dict[str, dict[str, float]] = {}
    """Named numbers of those before, between and after the stages, by moment: base, afterSft, afterDpo, afterRl."""
    steps: dict[str, int] = {}
    """Whole steps by stage."""
    optimizer_steps: int = 0
    skipped_steps: int = 0
    """Optimizer steps that were not taken because a gradient was not finite."""
    generate_seconds: float = 0.0
    train_seconds: float = 0.0
    rl_train_seconds: float = 0.0
    """The part of `train_seconds` that lies in RL steps."""
    reward: float | None = None
    """Mean reward of the newest RL step."""
    rl_step_seconds: float = 0.0
    """Wall time of whole RL steps; its ratio to the larger of training and generation says how well they overlap."""
    tokens_trained: int = 0
    positions_computed: int = 0
    padded_positions: int = 0
    dropped_groups: dict[str, int] = {}
    """Groups that were replaced, by reason."""
    user_code_failures: dict[str, int] = {}
    first_failures: dict[str, str] = {}
    """The first message of each reason."""

    def count_optimizer_step(self, *, taken: bool) -> None:
        """One more, or one that was skipped."""
        self.optimizer_steps += taken
        self.skipped_steps += not taken


class TrainerState(msgspec.Struct):
    """Where the run is."""

    seed: int
    stage: TrainingStage
    step: int = 0
    """Whole steps of `stage`."""
    stage_done: bool = False
    version: int = -1
    """Newest published weight version; -1 before the first."""
    oldest_version: int = 0
    """The first one of this learner's past: versions before it were published by trainers that went on from the same
    checkpoint to other weights."""
    weights_changed: bool = True
    """The learner's weights differ from `version`'s."""
    next_group: int = 0
    next_evaluation: int = 0
    """Evaluations have step numbers of their own towards the manager."""
    acknowledged: list[tuple[int, int]] = []
    """Batches that are part of this state, as half-open ranges of their numbers."""
    carried: int = 0
    """Prompts at the front of the cursor that the newest RL step left over: the next one trains all of them."""
    trained_groups: int = 0
    """Groups of the next RL step, by mini-batches of it that are learned: a run that was asked to stop had begun it."""
    cursors: dict[str, Any] = {}
    """`DataBuffer.state()` by stage."""
    results: Results = msgspec.field(default_factory=Results)

    @property
    def has_learned(self) -> bool:
        """The stage's model is no longer what the stage began with."""
        return self.step > 0 or self.trained_groups > 0

    def finish_step(self, cursor: dict[str, Any], sums: Mapping[str, float], *, left_after: int = 0) -> None:
        """The step is whole: from here on a checkpoint contains it. `cursor` is `DataBuffer.state()`, `sums` are the
        backend's. `left_after` so many more groups of it, the step is not: another process learns the rest."""
        self.step += not left_after
        self.trained_groups = self.trained_groups + left_after if left_after else 0
        self.weights_changed, self.stage_done = True, False
        self.cursors[self.stage] = cursor
        self.results.tokens_trained += int(sums["tokens"])
        self.results.positions_computed += int(sums["positions"])
        self.results.padded_positions += int(sums["padded_positions"])

    def copy(self) -> TrainerState:
        """An independent value."""
        return msgspec.json.decode(msgspec.json.encode(self), type=TrainerState)
