"""A row of samples.jsonl: what the model was asked, what it wrote, as text, and what that was worth.

Trainers write the file (`polyrl_trainer.sample_log`), the command line reads it, also while it grows. Texts are the
user's and the model's: whoever shows one makes it harmless first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from polyrl.errors import rows_of
from polyrl.sample import Finish, Purpose

SAMPLES: Final = "samples.jsonl"
"""File of a run's folder."""


MAX_REPORTED: Final = 8
"""Samples of one step or one evaluation that a manager is sent, to be read while the run goes on."""
MAX_REPORTED_BYTES: Final = 64 << 10
"""Of them together: a thousandth of what a frame may hold."""


class Chosen(StrEnum):
    """Why a training sample is among the few of its step that are kept."""

    BEST = "best"
    """None of its step has a higher reward."""
    WORST = "worst"
    """None of its step has a lower reward."""
    RANDOM = "random"
    """Drawn, whatever its reward: what is true of these is true of the step."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    time: float
    """Unix seconds."""
    purpose: Purpose
    stage: str
    """Training stage that the run was in: sft, rl."""
    step: int
    """Whole steps of that stage: the one that was trained with it, or the last one before its evaluation."""
    sample: str
    group: int
    chosen: tuple[Chosen, ...] = ()
    """Empty for evaluation, of which all samples are kept."""
    reward: float
    metrics: dict[str, float]
    """What the reward function named beside the reward."""
    advantage: float | None = None
    """What training multiplied its logprobs by; None for evaluation."""
    finish: Finish
    versions: tuple[int, ...]
    """Weight versions that generated it, in order."""
    prompt_tokens: int
    response_tokens: int
    prompt: str
    response: str

    @property
    def moment(self) -> tuple[str, str, int]:
        """What was recorded together has it in common."""
        return self.purpose, self.stage, self.step


def to_report(records: Sequence[SampleRecord]) -> tuple[bytes, ...]:
    """Lines of the few that a manager is sent: of training in their order, of an evaluation those with the lowest
    reward, which say what is left to learn. One that does not fit is left out."""
    if records and records[0].purpose is Purpose.EVAL:
        records = sorted(records, key=lambda record: record.reward)
    lines, room = [], MAX_REPORTED_BYTES
    for line in map(msgspec.json.encode, records[:MAX_REPORTED]):
        if len(line) <= room:
            room -= len(line)
            lines.append(line)
    return tuple(lines)


def parse_records(lines: Iterable[bytes]) -> list[SampleRecord]:
    """Lines to rows; what is none is left out, for a writer may have been killed over its last line."""
    return list(rows_of(lines, msgspec.json.Decoder(SampleRecord).decode, "samples.jsonl"))
