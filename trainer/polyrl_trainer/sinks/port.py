"""What a sink can do. Its calls may block and raise: `delivery` calls them in a thread of the sink's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from polyrl.sample_record import SampleRecord

GLOBAL_STEP: Final = "global_step"
"""Steps of all stages so far; what W&B draws everything over."""


@dataclass(frozen=True)
class MetricRow:
    """Named numbers of one step or one evaluation."""

    phase: str
    step: int
    """Over all stages."""
    time: float
    """Unix seconds."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Texts:
    """A few samples of one step or one evaluation."""

    purpose: str
    step: int
    """Over all stages."""
    records: Sequence[SampleRecord]

    @property
    def phase(self) -> str:
        """Apart from the rows' phases."""
        return f"samples/{self.purpose}"


Entry = MetricRow | Texts


@dataclass(frozen=True)
class SinkRun:
    """What a sink shows of a run beside its numbers."""

    folder: Path
    job: str
    name: str
    settings: Mapping[str, Any]
    """The manifest with its defaults, without values of variables."""


class MetricsSink(Protocol):
    """Open; one thread calls it. Every method may raise what its library raises."""

    @property
    def id(self) -> str:
        """By which a later process of the run goes on with it; empty where its place says that."""
        ...

    @property
    def settles_s(self) -> float:
        """Seconds from when a row was written to when it outlives whatever ends this process, by SIGKILL too."""
        ...

    def write(self, row: MetricRow) -> None:
        """One row."""
        ...

    def write_texts(self, texts: Texts) -> None:
        """A few samples."""
        ...

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        """The end: done, stopped or failed, with the numbers of trainer-result.json by path."""
        ...


def by_path(values: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """Values by their path."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= by_path(value, separator, f"{prefix}{name}{separator}")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
