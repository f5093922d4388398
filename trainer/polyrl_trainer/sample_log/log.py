"""samples.jsonl: a few samples of each RL step and all of an evaluation, written at once, bounded in all.

When the file would grow beyond its bound, every second step and evaluation of it is dropped, the newest kept, until it
is half as large: the older, the sparser, and the whole run stays in sight. A trainer that goes on from a checkpoint
drops what it is going to write again, as in metrics.jsonl.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from polyrl.manifest.recipe import SampleLogSpec
from polyrl.sample import Finish, Purpose, Scored
from polyrl.sample_record import SAMPLES, Chosen, SampleRecord, parse_records
from polyrl_trainer.checkpoints import append, replace_file, writing
from polyrl_trainer.sample import Sample, shown_metrics
from polyrl_trainer.sample_log.choice import choose
from polyrl_trainer.sample_log.texts import MAX_NAME_CHARS, readable
from polyrl_trainer.state import TrainerState, TrainingStage

SHARE_OF_A_MOMENT: Final = 4
"""One step or one evaluation takes at most this part of the file's bound, so that some of them fit."""
STAGES: Final = tuple(stage.value for stage in TrainingStage)
"""In the order in which a run goes through those that it has."""


class SampleLog:
    """The file's one writer."""

    def __init__(self, run: Path, spec: SampleLogSpec, seed: int) -> None:
        self._path, self._spec, self._seed = run / SAMPLES, spec, seed
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)

    def wants(self, purpose: Purpose) -> bool:
        """True when samples of this purpose are kept."""
        return self._spec.evaluation if purpose is Purpose.EVAL else self._spec.per_step > 0

    def record(
        self, state: TrainerState, purpose: Purpose, samples: Sequence[Sample], scored: Sequence[Scored]
    ) -> list[SampleRecord]:
        """Keeps those of one step, or of one evaluation, that are to be kept; `scored` are the same samples."""
        draw = random.Random(f"{self._seed} {state.stage} {state.step} {purpose}")
        chosen: dict[int, list[Chosen]] = {position: [] for position in range(len(samples))}
        if purpose is Purpose.TRAIN:
            groups, rewards = [one.group for one in samples], [one.reward for one in samples]
            chosen = choose(groups, rewards, self._spec.per_step, draw)
        records = [self._record(state, purpose, samples[n], scored[n], why) for n, why in chosen.items()]
        fitting = self._fitting(records, draw)
        self._append(b"".join(line for _, line in fitting))
        return [record for record, _ in fitting]

    def close(self) -> None:
        """Nothing is kept after it."""
        self._file.close()

    def _record(
        self, state: TrainerState, purpose: Purpose, sample: Sample, scored: Scored, chosen: Sequence[Chosen]
    ) -> SampleRecord:
        learned = sample.advantages is not None and sample.loss_mask.any()
        return SampleRecord(
            time=round(time.time(), 3),
            purpose=purpose,
            stage=state.stage.value,
            step=state.step,
            sample=sample.id,
            group=sample.group,
            chosen=tuple(chosen),
            reward=scored.reward,
            metrics={readable(name, MAX_NAME_CHARS): value for name, value in shown_metrics(scored.metrics).items()},
            advantage=float(sample.advantages[sample.loss_mask > 0][0]) if learned else None,  # type: ignore[index]
            finish=Finish(sample.finish_reason),
            versions=sample.versions,
            prompt_tokens=sample.prompt_length,
            response_tokens=sample.response_length,
            prompt=readable(sample.prompt, self._spec.max_chars),
            response=readable(sample.response, self._spec.max_chars),
        )

    def _fitting(self, records: Sequence[SampleRecord], draw: random.Random) -> list[tuple[SampleRecord, bytes]]:
        """Those that fit into one moment's share, with their lines; which ones is drawn."""
        lines = [msgspec.json.encode(record) + b"\n" for record in records]
        order, room, kept = list(range(len(lines))), self._spec.max_bytes // SHARE_OF_A_MOMENT, []
        draw.shuffle(order)
        for position in order:
            if len(lines[position]) <= room:
                room -= len(lines[position])
                kept.append(position)
        return [(records[position], lines[position]) for position in sorted(kept)]

    def _append(self, lines: bytes) -> None:
        if self._file.tell() + len(lines) > self._spec.max_bytes:
            self._file.close()
            replace_file(self._path, b"".join(thinned(read_lines(self._path), self._spec.max_bytes // 2)))
            self._file = self._path.open("ab", buffering=0)
        append(self._file, self._path, lines)


def read_lines(path: Path) -> list[bytes]:
    """Whole lines, each with its end."""
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def thinned(lines: Sequence[bytes], max_bytes: int) -> list[bytes]:
    """Every second moment of them, again and again until they fit; the newest stays."""
    rows = ((record.moment, line) for line in lines for record in parse_records([line]))
    moments = [[line for _, line in group] for _, group in itertools.groupby(rows, key=lambda row: row[0])]
    while len(moments) > 1 and sum(len(line) for moment in moments for line in moment) > max_bytes:
        moments = moments[::-1][::2][::-1]
    return [line for moment in moments for line in moment]


def go_back_to(path: Path, state: TrainerState, *, evaluated: bool) -> None:
    """Leaves in the file what had happened by `state`; another file takes its place at once, or none does.
    `evaluated`: the numbers of an evaluation after that step are known, if one was due."""
    if path.exists():
        replace_file(path, b"".join(kept_lines(read_lines(path), state, evaluated=evaluated)))


def kept_lines(lines: Iterable[bytes], state: TrainerState, *, evaluated: bool) -> Iterator[bytes]:
    """The lines that `state` has behind it; none that is no row, as the last one that its writer was killed over."""
    for line in lines:
        if any(_is_behind(record, state, evaluated) for record in parse_records([line])):
            yield line


def _is_behind(record: SampleRecord, state: TrainerState, evaluated: bool) -> bool:
    moment, reached = (STAGES.index(record.stage), record.step), (STAGES.index(state.stage), state.step)
    if moment != reached or record.purpose is Purpose.TRAIN:
        return moment <= reached
    # An evaluation follows the checkpoint of its step. One before, between or after the stages is done again, unless
    # the checkpoint knows its result; any other only where its writer was killed between its texts and its numbers.
    if state.step == 0:
        return "base" in state.results.evaluations
    return evaluated and not state.stage_done
