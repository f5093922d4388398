"""What the manager keeps and shows of the trainer's reports: rows, samples and status, bounded in number and in bytes.

The wire bounds a report only as a frame, so its own limits are enforced here, on receipt. Who reads a status, a run's
own runner or the operator, refuses one that exceeds `polyrl.status`, and would be blind from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Final

import msgspec
from msgspec.structs import asdict, replace

from polyrl.history.results import COUNTS, EVALUATION_PREFIX, REWARD_PREFIX, STATISTICS
from polyrl.history.rows import MetricsRow
from polyrl.sample_record import MAX_REPORTED, MAX_REPORTED_BYTES
from polyrl.status import MAX_COUNT, MAX_MEASURE, MAX_NAME, MAX_NUMBERS, FinishedStep, ManagerStatus, StepValue
from polyrl.wire import TrainerReport

MAX_ROWS: Final = 4_000
"""Ten times the points that a picture has; of forty numbers each they take some 25 MB."""
MAX_ROWS_BYTES: Final = 32 << 20
"""Bytes of all rows: half of what a reader of the history takes in one answer."""
MAX_ROW_BYTES: Final = 32 << 10
"""Bytes of one row: as many numbers as it may have, with names of a hundred characters."""
VALUE_BYTES: Final = 150
"""Memory of a number beside its name's characters: the float, the name's object, a dictionary's entry."""
MAX_VALUES: Final = 128
"""Numbers of one row: the trainer names forty, a reward function the rest."""
MAX_NAME_CHARS: Final = 200
MAX_SAMPLES: Final = 2_000
"""Together; those of 250 steps."""
MAX_SAMPLE_BYTES: Final = 2 << 20
"""Bytes of all samples together, as JSON; the newest ones stay."""
STEP_PARTS: Final = frozenset({
    "gen", "train", "wait", "update_weights", "publish_weights", "wait_for_weights", "reward_tail", "other", "overlap",
})  # fmt: skip
"""Parts of a step's wall time, as the trainer names them."""
TIMING: Final = "timing_s/"
STEP_SECONDS: Final = f"{TIMING}step"
_SHOWN: Final = frozenset({
    STEP_SECONDS,
    *(TIMING + part for part in STEP_PARTS),
    *(REWARD_PREFIX + name for name in STATISTICS),
    *(EVALUATION_PREFIX + name for name in ("reward", *COUNTS)),
})  # fmt: skip
"""Without these there is no picture of a run."""
_TRAINERS_OWN: Final = ("rollout/", "perf/", "weights/", "response_length/", "actor/", "data/", "sft/")
_STATUS_VALUES: Final = frozenset(StepValue)


class KeptRows:
    """The trainer's rows that still hold, in order."""

    def __init__(self) -> None:
        self.rows: list[MetricsRow] = []
        self._sizes: list[int] = []

    def take(self, report: TrainerReport, now: float) -> int:
        """Gives the count of its numbers that are left out."""
        # JSON has no NaN; what only status shows is no number of this step.
        named = {k: v for k, v in report.values.items() if k not in _STATUS_VALUES and isfinite(v)}
        values = bounded_values(named)
        row = MetricsRow(round(now, 3), report.phase[:MAX_NAME_CHARS], step=report.step, values=values)
        kept = rows_before(self.rows, row)
        self.rows, self._sizes = [*kept, row], [*self._sizes[: len(kept)], _row_bytes(values)]
        while len(self.rows) > MAX_ROWS or sum(self._sizes) > MAX_ROWS_BYTES:
            self._thin()
        return len(named) - len(values)

    def _thin(self) -> None:
        sizes = dict(zip(map(id, self.rows), self._sizes, strict=True))
        kept = without_half(self.rows)
        # Where nearly all are evaluations, of which none goes, the oldest ones do.
        self.rows = kept if len(kept) < len(self.rows) * 9 // 10 else self.rows[len(self.rows) // 2 :]
        self._sizes = [sizes[id(row)] for row in self.rows]


class KeptSamples:
    """The newest samples, as lines."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self._bytes = 0

    def take(self, lines: Sequence[bytes]) -> int:
        """Gives the count of lines that are left out because a report may not hold so much."""
        room, taken = MAX_REPORTED_BYTES, 0
        for line in lines[:MAX_REPORTED]:
            if len(line) <= room:
                room, taken = room - len(line), taken + 1
                self.lines.append(line)
        self._bytes += MAX_REPORTED_BYTES - room
        while self._bytes > MAX_SAMPLE_BYTES or len(self.lines) > MAX_SAMPLES:
            self._bytes -= len(self.lines.popleft())
        return len(lines) - taken


def bounded_values(values: Mapping[str, float]) -> dict[str, float]:
    """Numbers that fit: first what pictures are made of, then the trainer's own, then what a reward function names."""
    kept: dict[str, float] = {}
    room = MAX_ROW_BYTES
    for name in sorted(values, key=_rank):
        short = name[:MAX_NAME_CHARS]
        room -= _value_bytes(short)
        if room < 0 or len(kept) == MAX_VALUES:
            break
        kept.setdefault(short, values[name])
    return kept


def _rank(name: str) -> int:
    return 0 if name in _SHOWN else 1 if name.startswith(_TRAINERS_OWN) else 2


def _value_bytes(name: str) -> int:
    # As JSON a control character takes six bytes, and the history is sent as JSON.
    return VALUE_BYTES + len(msgspec.json.encode(name))


def _row_bytes(values: Iterable[str]) -> int:
    return sum(map(_value_bytes, values))


def rows_before(rows: Sequence[MetricsRow], new: MetricsRow) -> Sequence[MetricsRow]:
    """The rows that still hold when `new` comes: a step that was there already is done again, and all after it."""
    if new.phase == "eval":
        return rows[:-1] if rows and (rows[-1].phase, rows[-1].step) == (new.phase, new.step) else rows
    for position in range(len(rows) - 1, -1, -1):
        if rows[position].phase == new.phase:
            if rows[position].step < new.step:
                return rows
            again = next(at for at, row in enumerate(rows) if row.phase == new.phase and row.step >= new.step)
            return rows[:again]
    return rows


def without_half(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """Every second step of the older half left out; evaluations stay, for there are few."""
    half = len(rows) // 2
    older = [row for position, row in enumerate(rows[:half]) if position % 2 or row.phase == "eval"]
    kept = [*older, *rows[half:]]
    return kept if len(kept) <= MAX_ROWS else kept[-MAX_ROWS:]


def bounded_status(status: ManagerStatus) -> ManagerStatus:
    """The same where all of it is within bounds: what is too long is cut, what is too large says the most that can be
    said."""
    return replace(
        status,
        phase=status.phase[:MAX_NAME],
        step=_bounded_count(status.step),
        weight_version=min(status.weight_version, MAX_COUNT),
        values=_status_values(status.values),
        finished_steps=tuple(map(_bounded_step, status.finished_steps)),
    )


def _status_values(values: Mapping[str, float]) -> dict[str, float]:
    """Those of steps come first: the fleet's size hangs on them."""
    of_steps = {name: value for name, value in values.items() if name in _STATUS_VALUES}
    others = bounded_values({name: value for name, value in values.items() if name not in _STATUS_VALUES})
    return dict(islice((of_steps | others).items(), MAX_NUMBERS))


def _bounded_step(step: FinishedStep) -> FinishedStep:
    measures = {name: of for name, of in asdict(step).items() if isinstance(of, float)}
    bounded = {name: min(max(-MAX_MEASURE, of), MAX_MEASURE) for name, of in measures.items()}
    return replace(step, step=_bounded_count(step.step), **bounded)


def _bounded_count(number: int) -> int:
    return min(max(0, number), MAX_COUNT)
