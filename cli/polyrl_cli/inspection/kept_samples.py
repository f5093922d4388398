"""Reads samples.jsonl, and finds in it what a person asks for.

What cannot be found is answered with what can: the steps or groups that were kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from polyrl.errors import UserError
from polyrl.sample import Purpose
from polyrl.sample_record import Chosen, SampleRecord, parse_records
from polyrl_cli.local.run_folder import RunFolder

NAMED: Final = 8
"""Values that are named when the one asked for does not exist."""


class Order(StrEnum):
    """Which of the samples found come first."""

    AS_KEPT = "as kept"
    """By group, as in the file."""
    BEST = "best"
    """By reward, the highest first."""
    WORST = "worst"
    """By reward, the lowest first."""
    RANDOM = "random"
    """Drawn, and only among those that were kept whatever their reward: they are true of their step."""


@dataclass(frozen=True, kw_only=True)
class SampleQuery:
    """What was asked for."""

    step: int | None = None
    """None: the newest one."""
    group: int | None = None
    evaluation: bool = False
    order: Order = Order.AS_KEPT
    limit: int = 10


def read_samples(folder: RunFolder) -> list[SampleRecord]:
    """All that was kept, each sample of a step once, in the order of writing."""
    if not folder.samples.is_file():
        return []
    with folder.samples.open("rb") as lines:
        return list({(row.moment, row.sample): row for row in parse_records(lines)}.values())


def find(rows: Sequence[SampleRecord], query: SampleQuery) -> list[SampleRecord]:
    """All samples that were asked for. Raises UserError naming what there is when there are none."""
    if not rows:
        raise UserError(
            "no sample was kept yet: a run keeps some with its first evaluation or RL step, if recipe.logging.samples "
            "wants any"
        )
    if query.group is not None:
        if query.step is not None:
            raise UserError("--group says which step it is; leave --step away")
        return _of_group(rows, query.group)
    purpose = Purpose.EVAL if query.evaluation else Purpose.TRAIN
    found = [row for row in rows if row.purpose is purpose]
    if not found and not query.evaluation and query.step is None:
        found = list(rows)
    if not found:
        other = (
            "training samples were kept, no evaluation" if query.evaluation else "evaluations were kept (--evaluation)"
        )
        raise UserError(f"only {other}")
    if query.step is None:
        return [row for row in found if row.moment == found[-1].moment]
    of_step = [row for row in found if row.step == query.step]
    if not of_step:
        raise UserError(f"nothing was kept of step {query.step}; kept are steps {ranges(row.step for row in found)}")
    return [row for row in of_step if row.moment == of_step[-1].moment]


def _of_group(rows: Sequence[SampleRecord], group: int) -> list[SampleRecord]:
    found = [row for row in rows if row.group == group]
    if not found:
        newest = sorted({row.group for row in rows})[-NAMED:]
        raise UserError(f"nothing was kept of group {group}; among those kept are {', '.join(map(str, newest))}")
    return found


def ordered(rows: Sequence[SampleRecord], query: SampleQuery, draw: random.Random) -> list[SampleRecord]:
    """As many as were asked for, in the order asked for."""
    if query.order is Order.RANDOM:
        fair = [row for row in rows if not row.chosen or Chosen.RANDOM in row.chosen]
        return draw.sample(fair, min(query.limit, len(fair)))
    if query.order is not Order.AS_KEPT:
        rows = sorted(rows, key=lambda row: row.reward, reverse=query.order is Order.BEST)
    return list(rows[: query.limit])


def ranges(numbers: Iterable[int]) -> str:
    """`1 to 4, 6, 8 to 9`; of many the newest."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    words = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ", ".join([*(["…"] if len(words) > NAMED else []), *words[-NAMED:]])


def examples(rows: Sequence[SampleRecord], limit: int) -> list[str]:
    """Names of a few samples worth a look: of the newest step, if there was one, the best and the worst first."""
    trained = [row for row in rows if row.purpose is Purpose.TRAIN] or rows
    newest = [row for row in trained if row.moment == trained[-1].moment]
    return [row.sample for row in sorted(newest, key=lambda row: row.chosen[:1] in ((), (Chosen.RANDOM,)))][:limit]
