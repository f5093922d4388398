"""Which engines draw other tokens than the rest of the fleet.

An engine may send tokens that no policy drew, with logprobs that can be: of its own samples nobody can prevent it. But
the learner computes the logprob of every token that it trains, and two means over an engine's tokens show it:

    drift      of |learner's logprob - engine's|: far from the others' where logprobs are made up
    surprise   of -learner's logprob less the entropy at that position: 0 for whoever draws from the policy, whatever
               the prompts; not 0 for whoever chooses the tokens otherwise, even with true logprobs

Engines are compared within a cohort, whose tokens met the same learner: same weight version, same number of optimizer
steps since. The reference is the cohort's median, so fewer than half of its engines can be named, and one or two never
are: a fleet of which most engines lie together is not found out here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import sqrt
from statistics import median
from typing import Final, NamedTuple

import msgspec

from polyrl.wire import EngineMeasure, engine_shares

MIN_ENGINES: Final = 3
"""Fewest engines of a cohort: of two that differ, nobody knows which is right."""
MIN_TOKENS: Final = 64
"""Fewest tokens of an engine in a cohort: below it a mean says little."""
SPREADS: Final = 5.0
"""Standard deviations, of the fleet's means and of one mean: an honest engine leaves them once in a million steps."""
MAD_TO_DEVIATION: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

PAUSE_S: Final = 60.0
"""First pause of an engine that departs; doubles each time."""
MAX_PAUSE_S: Final = 480.0
"""Longest: less than a learner waits for a batch, should all other engines vanish meanwhile."""
MEMORY: Final = 256
"""Engines remembered that departed: names are chosen by those who might."""


class _Measure(NamedTuple):
    name: str
    floor: float
    """Mean difference, in nats, that no two honest engines have: bfloat16 against float32 gives 0.02."""
    deviation: float
    """Standard deviation of single tokens, in nats, at most: by it a mean over few of them is unsure."""


MEASURES: Final = (_Measure("drift", 0.1, deviation=0.5), _Measure("surprise", 0.2, deviation=2.0))


class Departure(msgspec.Struct, frozen=True):
    """An engine departs from its cohort."""

    engine: str
    text: str
    """By how much, and how large its share of the step is."""


class Departed(msgspec.Struct):
    """What is remembered of an engine that departed."""

    times: int
    until: float
    """End of its last pause, on the ledger's clock."""
    text: str


def departures(rows: Sequence[EngineMeasure]) -> list[Departure]:
    """Departures of engines, one of each, the furthest first."""
    found = sorted(_all_departures(rows), key=lambda one: -one[0])
    shares = engine_shares(rows)
    named: dict[str, Departure] = {}
    for _, engine, text in found:
        named.setdefault(engine, Departure(engine, f"{text}; {shares[engine]:.0%} of the step's tokens are its own"))
    return list(named.values())


def pause_of(times: int) -> float:
    """Seconds that an engine pauses when it departs for that time, 1 the first."""
    return min(PAUSE_S * 2.0 ** min(times - 1, 16), MAX_PAUSE_S)


def _all_departures(rows: Sequence[EngineMeasure]) -> Iterator[tuple[float, str, str]]:
    """(how often beyond its limit, engine, sentence)"""
    cohorts: dict[int, list[EngineMeasure]] = defaultdict(list)
    for row in rows:
        if row.tokens >= MIN_TOKENS:
            cohorts[row.cohort].append(row)
    measured = len({row.engine for cohort in cohorts.values() for row in cohort})
    for cohort in cohorts.values():
        # Versions are what engines say: a few could join an honest one that is late, and outvote it there.
        if len(cohort) >= MIN_ENGINES and 2 * len(cohort) > measured:
            for measure in MEASURES:
                yield from _beyond(cohort, measure)


def _beyond(cohort: Sequence[EngineMeasure], measure: _Measure) -> Iterator[tuple[float, str, str]]:
    values = {row.engine: float(getattr(row, measure.name)) for row in cohort}
    middle = median(values.values())
    spread = MAD_TO_DEVIATION * median(abs(value - middle) for value in values.values())
    for row in cohort:
        unsure = measure.deviation / sqrt(row.tokens)
        limit = max(measure.floor, SPREADS * spread) + SPREADS * unsure
        value = values[row.engine]
        if not abs(value - middle) <= limit:
            numbers = f"{value:.3g} nats over {row.tokens} tokens, the fleet's {middle:.3g}"
            yield abs(value - middle) / limit, row.engine, f"{measure.name} {numbers}"
