"""The trainer, unchanged, which writes down each batch before it learns from it: one line in RUN/trained.jsonl."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import msgspec
import typer
from outcome import TRAINED, TrainedSample

from polyrl.sample import split_sample_id
from polyrl.wire import Batch
from polyrl_trainer import __main__ as trainer
from polyrl_trainer.generation.supply import StepGroups
from polyrl_trainer.loops.rl_loop import RlStep
from polyrl_trainer.sample import Sample


def trained_sample(sample: Sample, step: int) -> TrainedSample:
    """What is compared between two runs."""
    _, index = split_sample_id(sample.id)
    ids = tuple(sample.tokens[sample.prompt_length :].tolist())
    return TrainedSample(step, sample.prompt, index=index, ids=ids, versions=sample.versions, reward=sample.reward)


def main(run: Path) -> None:
    """The trainer's own command line."""
    receive = RlStep._receive

    def recorded(self: RlStep, groups: StepGroups, batch: Batch) -> list[Sample]:
        samples = receive(self, groups, batch)
        with (run / TRAINED).open("ab") as file:
            file.write(msgspec.json.encode([trained_sample(sample, self._step) for sample in samples]) + b"\n")
        return samples

    with patch.object(RlStep, "_receive", recorded):
        typer.run(trainer.main)


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--run") + 1]))
