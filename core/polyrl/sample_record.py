"""A row of samples.jsonl: what the model was asked, what it wrote, as text, and what that was worth.

Trainers write the file (`polyrl_trainer.sample_log`), the command line reads it, also while it grows. Texts are the
user's and the model's: whoever shows one makes it harmless first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from polyrl.errors import InvalidData, rows_of
from polyrl.sample import Finish, Purpose

SAMPLES: Final = "samples.jsonl"
"""File of a run's folder."""


MAX_REPORTED: Final = 8
"""Samples of one step or one evaluation that a manager is sent, to be read while the run goes on."""
MAX_REPORTED_BYTES: Final = 64 << 10
"""Most bytes of these samples together: a thousandth of what a frame may hold."""
MAX_RECORD_BYTES: Final = 16 << 20
"""Most bytes of a row: a million tokens of prompt and response have half. A file from elsewhere may be one row."""
MAX_RECORD_NUMBERS: Final = 1_000
"""Most numbers that a reward function names of one sample, and most versions that it went through."""
MAX_SAMPLE_NUMBERS: Final = 5_000_000
"""Most numbers of a file: ten of each row, of which there are 500,000; a gigabyte once they are read."""


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
    chosen: Annotated[tuple[Chosen, ...], msgspec.Meta(max_length=len(Chosen))] = ()
    """Empty for evaluation, of which all samples are kept."""
    reward: float
    metrics: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_RECORD_NUMBERS)]
    """What the reward function named beside the reward."""
    advantage: float | None = None
    """What training multiplied its logprobs by; None for evaluation."""
    finish: Finish
    versions: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RECORD_NUMBERS)]
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
    """Lines to rows; what is none is left out, for a writer may have been killed over its last line. Raises InvalidData
    when there are more rows, or numbers in them, than a run keeps."""
    found, numbers = list[SampleRecord](), 0
    for record in rows_of(lines, _record, SAMPLES):
        numbers += len(record.metrics) + len(record.versions)
        if numbers > MAX_SAMPLE_NUMBERS:
            raise InvalidData(f"{SAMPLES}: has more than {MAX_SAMPLE_NUMBERS:,} numbers, the most that are read")
        found.append(record)
    return found


def _record(line: bytes) -> SampleRecord:
    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(f"a row of {len(line)} bytes is none")
    return _DECODER.decode(line)


_DECODER: Final = msgspec.json.Decoder(SampleRecord)
