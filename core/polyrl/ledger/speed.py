"""How long generating and reading take on each engine, as far as the ledger can know: all of it measured.

Model: a decoding step of an engine with b running samples takes `step_s * (1 + b / half_batch)` seconds and gives each
of them one token; reading n tokens takes `n * prefill_s`. Tokens that arrive are counted over windows; each window is
one observation (b, seconds per step). `half_batch` is the slope of a straight line through the last windows, once they
differ enough in b; `step_s` is a smoothed mean. `prefill_s` comes from first tokens: from the Assign to the first row.

Refuses to hold: decisions (see `placement`, `rebalance`).
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from polyrl.ledger.state import Counters, Engine, SampleState, State

HALF_BATCH: Final = 64.0
"""Running samples at which a step takes twice as long as alone, until measured: GPUs reach it at 64-256."""

HALF_BATCH_RANGE: Final = (4.0, 1024.0)
"""What a measurement may say: a CPU with four samples, a large GPU that hardly notices them."""

PREFILL_RATIO: Final = 50
"""Tokens read in the time of one decoding step, until measured; on the low side, so moving never looks too cheap."""

MIN_READ: Final = 512
"""Tokens to read from which the first token's delay tells the reading speed; below it is all network and scheduling."""

WINDOW_S: Final = 1.0
"""Tokens are counted over at least this long before they count as speed; evens out frames and prefills."""

SMOOTHING: Final = 0.3
"""Weight of the newest window."""

SLOWER_READ: Final = 0.05
"""Weight of a first token that came later than reading explains: waiting behind others only ever adds."""

FORGETTING: Final = 0.95
"""What is left of a window in the line after the next one: it remembers some twenty."""

WINDOWS_BEFORE_LINE: Final = 5.0
"""Windows to see before a line through them is believed; older ones count less."""

SPREAD_BEFORE_LINE: Final = 0.2
"""Standard deviation of b over its mean from which on there is a line to be seen."""

DEFAULT_STEP_S: Final = 0.03
"""Seconds per step of an engine when none was measured yet; any value would do."""

TURNS_BEFORE_MEAN: Final = 16
"""Turns to see before their mean length is believed; until then each may take its whole budget."""

MEAN_MEMORY: Final = 200
"""Turns over which the mean length forgets: several groups, fewer than a step."""


Line: TypeAlias = tuple[float, float, float, float, float]
"""Moments of the windows, sums of 1, b, s, bb, bs."""


class Pace(NamedTuple):
    """An engine's speed."""

    step_s: float
    """Seconds per decoding step at batch size 0."""
    half_batch: float
    prefill_s: float
    """Seconds per token to read."""

    def step(self, running: int) -> float:
        """Seconds per token and sample with `running` samples."""
        return self.step_s * (1 + running / self.half_batch)

    def read(self, tokens: int) -> float:
        """Seconds to read `tokens` before the first new one."""
        return self.prefill_s * tokens

    def wait(self, ahead: int, running: int, tokens: int) -> float:
        """Seconds until `ahead` of `running` samples have ended, each with `tokens` still to come on the average."""
        return ahead * tokens * self.step(running) / running if ahead and running else 0.0


def pace_of(engine: Engine, fleet: float) -> Pace:
    """Measured; what was not yet, is the fleet's step (see `fleet_step`) and the defaults."""
    step_s = engine.step_scale or fleet
    return Pace(step_s, engine.half_batch or HALF_BATCH, engine.prefill_s or step_s / PREFILL_RATIO)


def fleet_step(state: State) -> float:
    """`Pace.step_s` of an engine without measurements: the mean of the others."""
    known = [engine.step_scale for engine in state.engines.values() if engine.step_scale]
    return sum(known) / len(known) if known else DEFAULT_STEP_S


def smoothed(old: float, new: float) -> float:
    """Exponential mean; the first value counts whole."""
    return new if old == 0.0 else old + SMOOTHING * (new - old)


def observe_window(engine: Engine, seconds: float) -> None:
    """Part of `fold`: `engine.window_tokens` (> 0) came in `seconds` from the samples that it runs."""
    running = len(engine.running)
    step = running * seconds / engine.window_tokens
    line = engine.line = _with(engine.line, running, step)
    engine.half_batch = _half_batch(line) or engine.half_batch
    engine.step_scale = smoothed(engine.step_scale, step / (1 + running / (engine.half_batch or HALF_BATCH)))
    engine.tokens_per_s = smoothed(engine.tokens_per_s, engine.window_tokens / seconds)


def _with(line: Line, b: float, s: float) -> Line:
    """One window more, the others a little forgotten."""
    count, sum_b, sum_s, sum_bb, sum_bs = (FORGETTING * old for old in line)
    return count + 1, sum_b + b, sum_s + s, sum_bb + b * b, sum_bs + b * s


def _half_batch(line: Line) -> float:
    """Intercept over slope of the least-squares line through the windows; 0 while they do not tell."""
    count, b, s, bb, bs = line
    mean = b / count
    variance = bb / count - mean * mean
    if count < WINDOWS_BEFORE_LINE or variance < (SPREAD_BEFORE_LINE * mean) ** 2:
        return 0.0
    slope = (bs / count - mean * s / count) / variance
    low, high = HALF_BATCH_RANGE
    if slope <= 0:
        return high
    return min(high, max(low, (s / count - slope * mean) / slope))


def observe_first_token(engine: Engine, tokens: int, seconds: float) -> None:
    """Part of `fold`: the first token after reading `tokens` came after `seconds`."""
    if tokens < MIN_READ or seconds <= 0:
        return
    new, old = seconds / tokens, engine.prefill_s
    engine.prefill_s = smoothed(old, new) if new < old or not old else old + SLOWER_READ * (new - old)


def mean_after(counters: Counters, tokens: int) -> float:
    """The mean turn length once one more turn of `tokens` ended."""
    return counters.mean_turn_tokens + (tokens - counters.mean_turn_tokens) / min(counters.turns + 1, MEAN_MEMORY)


def expected_tokens(state: State, sample: SampleState) -> int:
    """Tokens that engines will still generate in this turn, never more than the budget leaves."""
    left = state.groups[sample.group].group.sampling.max_new_tokens - sample.generated
    counters = state.counters
    if counters.turns < TURNS_BEFORE_MEAN:
        return left
    # A long one is more likely to stay long: what it already has beyond the mean says that the mean is not its own.
    mean = counters.mean_turn_tokens
    return max(1, min(left, int(max(mean - (sample.length - sample.turn_start), mean / 2))))
