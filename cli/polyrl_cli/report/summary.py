"""What a run came to: the numbers of `summary.json`, computed once from what trainer, manager and fleet wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from polyrl.errors import UNDECODABLE
from polyrl.history.cost import RunCost
from polyrl.history.losses import RolloutLoss
from polyrl.history.results import Course, EvaluationPoint
from polyrl.history.rows import MetricsRow
from polyrl.history.steps import TRAINING_PHASES
from polyrl.status import ManagerStatus, SampleCounts, TokenCounts

STEP_PARTS: Final = {
    "generate": "timing_s/gen",
    "train": "timing_s/train",
    "wait": "timing_s/wait",
    "updateWeights": "timing_s/update_weights",
    "rewardTail": "timing_s/reward_tail",
    "other": "timing_s/other",
    "overlap": "timing_s/overlap",
}
"""Parts of an RL step in the summary and in metrics.jsonl, which the metrics' reference explains."""


class SinkResult(msgspec.Struct, frozen=True):
    """What became of the rows for one sink of metrics."""

    written: int
    lost: int
    error: str = ""
    """The first failure."""


class TrainerResult(msgspec.Struct, frozen=True, rename="camel"):
    """The part of trainer-result.json that is shown; the summary's fields of the same names explain it."""

    exact_match: dict[str, float] = {}
    steps: dict[str, int] = {}
    generate_seconds: float = 0.0
    train_seconds: float = 0.0
    step_time_ratio: float | None = msgspec.field(default=None, name="stepRatio")
    user_code_failures: dict[str, int] = {}
    first_failures: dict[str, str] = {}
    sinks: dict[str, SinkResult] = {}


class Summary(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """summary.json."""

    job: str
    outcome: str
    """succeeded, failed or interrupted."""
    cause: str
    """What the worker at fault said last, in its own words; empty when the run succeeded or nobody said anything."""
    why: str
    """How the run ended, as its planner saw it."""
    seed: int
    run_epoch: int = msgspec.field(name="epoch")
    exact_match: dict[str, float]
    """base, afterSft, afterRl: those that were measured, if the reward function names `exact_match`."""
    learned: dict[str, Course]
    """Numbers of training samples over the whole run: `reward`, and what the reward function names."""
    evaluations: list[EvaluationPoint]
    """All of the whole run, in order."""
    steps: dict[str, int]
    """Whole steps, by stage."""
    wall_seconds: float
    """From the first process to the last, this start of the run only."""
    seconds: dict[str, float]
    """Where they went: start, sft, rl, rest."""
    samples: SampleCounts
    samples_trained: int
    """Acknowledged samples that are of whole RL steps."""
    samples_evaluated: int
    """Acknowledged samples that are of whole evaluations."""
    tokens: TokenCounts
    bytes_per_token: float | None
    """Agent to manager, per generated token."""
    cost: RunCost | None = None
    """Cost of this start of the run; null where the manifest names no prices."""
    preemptions: int
    losses: list[RolloutLoss]
    generate_seconds: float
    train_seconds: float
    step_time_ratio: float | None
    """RL step time ÷ max(generate, train), over the whole run; 1 is perfect overlap."""
    user_code_failures: dict[str, int]
    """Calls of the user's functions that gave no verdict, by reason."""
    first_failures: dict[str, str]
    """The first message of each of those reasons."""
    sinks: dict[str, SinkResult] = {}
    """What became of TensorBoard, W&B and MLflow, by the last process of the trainer."""
    step_parts: dict[str, float]
    """Seconds of RL steps by part; `overlap` is what would be missing if the others were added up."""
    gpus: dict[str, list[str]] = {}
    """GPUs of every worker that had some, by the worker's name; numbered as nvidia-smi does."""


def read_trainer_result(file: Path) -> TrainerResult:
    """What the trainer left behind; empty when it left nothing or something broken (it may have been killed)."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=TrainerResult)
    except (OSError, *UNDECODABLE):
        return TrainerResult()


def step_parts(reports: Sequence[MetricsRow]) -> dict[str, float]:
    """Seconds of all RL steps together, by part."""
    steps = [report.values for report in reports if report.phase == "rl"]
    return {part: round(sum(values.get(name, 0.0) for values in steps), 3) for part, name in STEP_PARTS.items()}


def seconds_by_stage(reports: Sequence[MetricsRow], began: float, wall_seconds: float) -> dict[str, float]:
    """Wall seconds: `start` until the first report, steps by stage, and the rest (evaluation, checkpoints, the end)."""
    if not reports:
        return {"start": round(wall_seconds, 3)}
    took = {"start": max(0.0, reports[0].time - began - reports[0].values.get("timing_s/step", 0.0))}
    for stage in TRAINING_PHASES:
        took[stage] = sum(report.values.get("timing_s/step", 0.0) for report in reports if report.phase == stage)
    took["rest"] = max(0.0, wall_seconds - sum(took.values()))
    return {stage: round(seconds, 3) for stage, seconds in took.items() if seconds > 0}


def bytes_per_token(status: ManagerStatus) -> float | None:
    """Wire bytes of deltas per generated token; None when nothing was generated."""
    generated = status.tokens.generated
    return round(status.delta_bytes / generated, 2) if generated else None
