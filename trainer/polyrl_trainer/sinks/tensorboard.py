"""TensorBoard's event files in the run's folder, tags named as in metrics.jsonl; a few samples as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from polyrl.sample_record import Chosen, SampleRecord
from polyrl_trainer.sinks.port import MetricRow, Texts

SHOWN_SAMPLES: Final = 4
"""Samples shown of one step or one evaluation; samples.jsonl has more."""
SHOWN_CHARS: Final = 1000
"""Characters shown of a text."""


class TensorBoardSink:
    """RUN/tensorboard."""

    id = ""
    settles_s = 0.0

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder))

    def write(self, row: MetricRow) -> None:
        for name, value in row.values.items():
            self._events.add_scalar(name, value, row.step, row.time)
        self._events.flush()

    def write_texts(self, texts: Texts) -> None:
        extremes_first = sorted(texts.records, key=lambda record: record.chosen[:1] in ((), (Chosen.RANDOM,)))
        self._events.add_text(texts.phase, markdown(extremes_first[:SHOWN_SAMPLES]), texts.step)
        self._events.flush()

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        self._events.close()


def markdown(records: Sequence[SampleRecord]) -> str:
    """Samples as TensorBoard's page renders them; texts stand in indented blocks, in which nothing is markup."""
    return "\n\n".join(
        f"**{one.sample}** reward {one.reward:g}, {one.finish}\n\n{_block(one.prompt)}\n\n---\n\n{_block(one.response)}"
        for one in records
    )


def _block(text: str) -> str:
    shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]} […]"
    return "\n".join(f"    {line}" for line in shown.splitlines()) or "    "
