"""What a run has trained: per step, prompt and sample, the tokens, their weight versions and the reward; the losses.

Two runs are equal when all of it is, token id for token id; losses up to the order in which float32 numbers are summed.
A step that was trained twice, because its trainer was killed before its checkpoint, must have been the same both times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

TRAINED: Final = "trained.jsonl"
"""In the run's folder; a line a batch, each a list of `TrainedSample`."""

LOSSES: Final = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "rollout_corr/kl", "reward/mean", "reward/std")

TOLERANCE: Final = 1e-4
"""Of a loss, relative: float32 sums over micro-batches in the order of arrival, through a few optimizer steps."""

LEAST: Final = 1e-6
"""Absolute: a policy gradient's loss is a difference of numbers near 1."""


class TrainedSample(msgspec.Struct, frozen=True, array_like=True):
    """One sample in a batch."""

    step: int
    prompt: str
    index: int
    ids: tuple[int, ...]
    versions: tuple[int, ...]
    """Of the hashed job one per token, of the real one each once."""
    reward: float

    @property
    def key(self) -> tuple[str, int]:
        """Within a step."""
        return self.prompt, self.index

    @property
    def unnumbered(self) -> TrainedSample:
        """A real run's sample without the number of its one version: steps that a killed trainer had not saved are
        learned again, and their weights come again under later numbers."""
        return self if len(self.versions) != 1 else replace(self, versions=())


@dataclass
class Outcome:
    """Of a finished run."""

    steps: dict[int, dict[tuple[str, int], TrainedSample]] = field(default_factory=dict)
    losses: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step; empty where nothing is learned."""
    faults: list[str] = field(default_factory=list)
    """Where the run contradicts itself."""

    @property
    def samples(self) -> int:
        return sum(len(step) for step in self.steps.values())

    @property
    def mixed(self) -> int:
        """Samples whose tokens are of several versions."""
        return sum(len(set(sample.versions)) > 1 for step in self.steps.values() for sample in step.values())

    @property
    def tokens(self) -> int:
        return sum(len(sample.ids) for step in self.steps.values() for sample in step.values())


def read_outcome(run: Path) -> Outcome:
    """Raises OSError when nothing was trained."""
    outcome = Outcome()
    for line in (run / TRAINED).read_bytes().splitlines():
        for sample in _decode(line):
            before = outcome.steps.setdefault(sample.step, {}).setdefault(sample.key, sample)
            if before.unnumbered != sample.unnumbered:
                outcome.faults.append(f"step {sample.step} was trained twice with {sample.key} different")
    metrics = run / "metrics.jsonl"
    for line in metrics.read_bytes().splitlines() if metrics.exists() else ():
        values = msgspec.json.decode(line)
        outcome.losses[values["step"]] = {name: values[name] for name in LOSSES}
    return outcome


def _decode(line: bytes) -> list[TrainedSample]:
    try:
        return msgspec.json.decode(line, type=list[TrainedSample])
    except msgspec.DecodeError:
        return []  # its writer was killed while it wrote


def differences(got: Outcome, wanted: Outcome) -> Iterable[str]:
    """A sentence for each step that is not as in the undisturbed run, and for each loss."""
    yield from got.faults
    if got.steps.keys() != wanted.steps.keys():
        yield f"steps {sorted(got.steps)} were trained instead of {sorted(wanted.steps)}"
    for step in sorted(got.steps.keys() & wanted.steps.keys()):
        mine, theirs = got.steps[step], wanted.steps[step]
        if mine.keys() != theirs.keys():
            yield f"step {step} trained {len(mine.keys() ^ theirs.keys())} samples of the wrong prompts"
        wrong = [key for key in mine.keys() & theirs.keys() if mine[key].unnumbered != theirs[key].unnumbered]
        if wrong:
            key = min(wrong)
            yield f"step {step}: {len(wrong)} samples differ, first {mine[key]} instead of {theirs[key]}"
        yield from _losses_wrong(step, got, wanted)


def _losses_wrong(step: int, got: Outcome, wanted: Outcome) -> Iterable[str]:
    theirs = wanted.losses.get(step, {})
    mine = got.losses.get(step, {})
    if mine.keys() != theirs.keys():
        yield f"step {step} reports {sorted(mine)} instead of {sorted(theirs)}"
        return
    for name, value in theirs.items():
        if not isclose(mine[name], value, rel_tol=TOLERANCE, abs_tol=LEAST):
            yield f"step {step}: {name} is {mine[name]} instead of {value}"
