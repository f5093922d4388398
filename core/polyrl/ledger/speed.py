"""How long generating takes, as far as the ledger can know: one measured number per engine, one mean length per run.

Model: a decoding step of an engine with b running samples takes `scale * (1 + b / HALF_BATCH)` seconds and gives each
of them one token; prefilling PREFILL_RATIO tokens takes as long as a step of an empty batch. `scale` is measured from
the tokens that arrive. Only comparisons between engines matter, so a common error in the constants cancels.

Refuses to hold: decisions (see `placement`, `rebalance`).
"""

from __future__ import annotations

from typing import Final

from polyrl.ledger.state import Counters, Engine, SampleState, State

HALF_BATCH: Final = 64
"""Running samples at which a step takes twice as long as alone: GPUs reach it at 64-256, CPUs sooner."""

PREFILL_RATIO: Final = 50
"""Prompt tokens prefilled in the time of one decoding step; on the low side, so that moving never looks too cheap."""

WINDOW_S: Final = 1.0
"""Tokens are counted over at least this long before they count as speed; evens out frames and prefills."""

SMOOTHING: Final = 0.3
"""Weight of the newest window."""

DEFAULT_SCALE: Final = 0.03
"""Seconds per step of an engine when none was measured yet; any value would do."""

TURNS_BEFORE_MEAN: Final = 16
"""Turns to see before their mean length is believed; until then each may take its whole budget."""

MEAN_MEMORY: Final = 200
"""Turns over which the mean length forgets: several groups, fewer than a step."""


def step_seconds(scale: float, running: int) -> float:
    """Seconds per token and sample with `running` samples."""
    return scale * (1 + running / HALF_BATCH)


def measured_scale(running: int, seconds: float, tokens: int) -> float:
    """The scale that explains `tokens` (> 0) in `seconds` by `running` samples."""
    return running * seconds / tokens / (1 + running / HALF_BATCH)


def smoothed(old: float, new: float) -> float:
    """Exponential mean; the first value counts whole."""
    return new if old == 0.0 else old + SMOOTHING * (new - old)


def mean_after(counters: Counters, tokens: int) -> float:
    """The mean turn length once one more turn of `tokens` ended."""
    return counters.mean_turn_tokens + (tokens - counters.mean_turn_tokens) / min(counters.turns + 1, MEAN_MEMORY)


def fleet_scale(state: State) -> float:
    """What an engine without measurements is taken for."""
    known = [engine.step_scale for engine in state.engines.values() if engine.step_scale]
    return sum(known) / len(known) if known else DEFAULT_SCALE


def scale_of(engine: Engine, fleet: float) -> float:
    """Measured, or the fleet's."""
    return engine.step_scale or fleet


def expected_tokens(state: State, sample: SampleState) -> int:
    """Tokens that engines will still generate in this turn, never more than the budget leaves."""
    left = state.groups[sample.group].group.sampling.max_new_tokens - sample.generated
    counters = state.counters
    if counters.turns < TURNS_BEFORE_MEAN:
        return left
    # A long one is more likely to stay long: what it already has beyond the mean says that the mean is not its own.
    mean = counters.mean_turn_tokens
    return max(1, min(left, int(max(mean - (sample.length - sample.turn_start), mean / 2))))


def prefill_seconds(scale: float, tokens: int) -> float:
    """Seconds to read `tokens` before the first new one."""
    return scale * tokens / PREFILL_RATIO
