"""How long generating and reading take on each engine, as far as the ledger can know: all of it measured.

Model: a decoding step of an engine with b running samples takes `step_s * (1 + b / half_batch)` seconds and gives each
of them one token; reading n tokens takes `n * prefill_s`. Tokens that arrive are counted over windows; each window is
one observation (b, seconds per step). `half_batch` is the slope of a straight line through the last windows, once they
differ enough in b; `step_s` is a smoothed mean. `prefill_s` comes from first tokens: from the first Assign of a
time of reading to its last first token, by the tokens that were read. Before its first window an engine is as fast as
its agent has tried it, if it has; what it tries anew of an engine that has had no work for a while counts as the first
time. Of one that has been idle for STALE_S without that nothing is known any more: its next window counts whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, nextafter
from typing import Final, NamedTuple, TypeAlias

from polyrl.ledger.state import LeasedEngine, LedgerState, SampleState
from polyrl.sample import Pool

HALF_BATCH: Final = 64.0
"""Running samples at which a step takes twice as long as alone, until measured: GPUs reach it at 64-256."""

HALF_BATCH_RANGE: Final = (4.0, 1024.0)
"""What a measurement may say: a CPU with four samples, a large GPU that hardly notices them."""

PREFILL_RATIO: Final = 50
"""Tokens read in the time of one decoding step, until measured; on the low side, so moving never looks too cheap."""

MIN_READ: Final = 512
"""Tokens to read from which the first token's delay tells the reading speed; below it is all network and scheduling."""

TRIED_STEP_S: Final = (1e-5, 2.0)
"""What an agent may say of a step: less is a matter of clocks, and for more it does not try."""

TRIED_IDLE_S: Final = 10.0
"""What an agent has tried counts after so long without a token, a sample or another trial: more often it says nothing
that is not known, and each is written down."""

TRIED_FASTER: Final = 4.0
"""So many times faster than its tokens showed an engine is not by its agent's word: what is fast only while it has no
work would get all that waits each time. One sample tries it, once that is old."""

ABOUT: Final = 1.25
"""Two speeds within so many times each other are about the same: a trial confirms what was measured of more tokens, and
what runs has no reason to move."""

WINDOW_S: Final = 1.0
"""Tokens are counted over at least this long before they count as speed; evens out frames and prefills."""

SEEN_S: Final = 0.5
"""What a sample shows in less time on an engine that was not measured says nothing."""

BACKLOG_S: Final = 1.0
"""Time after our own absence in which what has piled up is read: sockets hold no more than that takes."""

SMOOTHING: Final = 0.3
"""Weight of the newest window."""

FORGETTING: Final = 0.95
"""What is left of a window in the line after the next one: it remembers some twenty."""

WINDOWS_BEFORE_LINE: Final = 5.0
"""Windows to see before a line through them is believed; older ones count less."""

SPREAD_BEFORE_LINE: Final = 0.2
"""Standard deviation of b over its mean from which on there is a line to be seen."""

DEFAULT_STEP_S: Final = 0.03
"""Seconds per step of an engine when none was measured yet; any value would do."""

OPTIMISM: Final = 0.5
"""Share of the mean step that an idle engine is taken to need until it is measured: so one sample tries it, even where
all others are slow; with that one it is taken for average."""

STALE_S: Final = 30.0
"""Without a token for so long, what was measured may no longer hold: a throttled device cools down, a neighbour leaves.
Ten times what the work of one sample tells about an engine, so trying again costs little."""

TOKENLESS_S: Final = 3.0
"""Without a token for so long, an engine that runs samples is taken for as slow as that: a hundred steps of most."""

Line: TypeAlias = tuple[float, float, float, float, float]
"""Moments of the windows, sums of 1, b, s, bb, bs."""

NO_LINE: Final[Line] = (0.0, 0.0, 0.0, 0.0, 0.0)
"""Moments of no window."""


class Pace(NamedTuple):
    """An engine's speed."""

    step_s: float
    """Seconds per decoding step at batch size 0."""
    half_batch: float
    prefill_s: float
    """Seconds per token to read."""

    def step(self, running: float) -> float:
        """Seconds per token and sample with `running` samples, also on the average."""
        return self.step_s * (1 + running / self.half_batch)

    def slower(self, times: float) -> Pace:
        """One whose steps take so many times longer."""
        return self._replace(step_s=self.step_s * times)

    def read(self, tokens: int) -> float:
        """Seconds to read `tokens` before the first new one."""
        return self.prefill_s * tokens

    def wait(self, ahead: int, running: int, tokens: int) -> float:
        """Seconds until `ahead` of `running` samples have ended, each with `tokens` still to come on the average."""
        return ahead * tokens * self.step(running) / running if ahead and running else 0.0


def pace_of(engine: LeasedEngine, mean: float) -> Pace:
    """Measured; what was not yet, is the fleet's `mean_step` and the defaults."""
    step_s = engine.step_scale or (mean if engine.occupied else OPTIMISM * mean)
    return Pace(step_s, engine.half_batch or HALF_BATCH, prefill_s=engine.prefill_s or step_s / PREFILL_RATIO)


def mean_step(engines: Iterable[LeasedEngine]) -> float:
    """`Pace.step_s` of an engine without measurements: the mean of the others."""
    known = [engine.step_scale for engine in engines if engine.step_scale]
    return sum(known) / len(known) if known else DEFAULT_STEP_S


def is_stale(engine: LeasedEngine, now: float) -> bool:
    """Whether it has worked, or was tried, and then been idle for so long that its measurement is to be tried."""
    return max(engine.token_at, engine.tried_at) > -inf and _is_idle_since(engine, now - STALE_S)


def _is_idle_since(engine: LeasedEngine, at: float) -> bool:
    """Whether nothing was asked of it, or heard of its speed, from then on."""
    return not engine.running and max(engine.token_at, engine.tried_at, engine.assigned_at) <= at


def tokenless_s(engine: LeasedEngine) -> float:
    """For how long it has been heard, and has run samples, without a token: a step takes no less. 0 for a reserved
    engine, whose devices may learn, and while it reads, which has a deadline of its own. Silence does not count: for
    that there is a lease."""
    if not engine.running or engine.reading or engine.silent or engine.pool is Pool.RESERVED:
        return 0.0
    since = max(engine.token_at, engine.window_at, engine.read_at, engine.greeted_at, engine.counts_from)
    return engine.heard_at - since


def end_trial(engine: LeasedEngine, tokens: int, seconds: float, *, reads: bool) -> None:
    """Part of `apply`: a sample left that had `tokens` made in so many seconds. Of an engine that was not measured, at
    most tried by its agent, that is what is known: else it would be tried again and again. Its next window replaces
    it. While an engine `reads`, what its agent has tried says more."""
    shown = engine.step_scale and (engine.on_trial or engine.line != NO_LINE or reads)
    if shown or engine.pool is Pool.RESERVED or seconds < SEEN_S:
        return
    seen = engine.window_load / engine.window_tokens if engine.window_tokens else seconds / (tokens + 1)
    engine.step_scale, engine.on_trial = seen, True


def is_news(engine: LeasedEngine, step_s: float, tried_at: float) -> bool:
    """Whether what an agent has tried of its engine, at `tried_at`, is not known; of what generates, tokens say it."""
    shortest, longest = TRIED_STEP_S
    unknown = not engine.step_scale or _is_idle_since(engine, tried_at - TRIED_IDLE_S)
    if engine.on_trial or engine.tokens_per_s:
        shortest = max(shortest, engine.step_scale / TRIED_FASTER)
    return unknown and shortest <= step_s <= longest


def is_about(step_s: float, known: float) -> bool:
    """Whether it is what was known, as far as it matters."""
    return known / ABOUT <= step_s <= known * ABOUT


def take_trial(engine: LeasedEngine, step_s: float, read_s: float, at: float) -> None:
    """Part of `apply`: what its agent has tried. Its next window replaces that."""
    engine.tried_at, before = at, engine.step_scale
    scale = step_s / (1 + 1 / (engine.half_batch or HALF_BATCH))
    if before and is_about(scale, before):
        return
    tried_s = read_s if 0 < read_s <= step_s else 0.0
    engine.prefill_s = (tried_s or engine.prefill_s) if before else (engine.prefill_s or tried_s)
    engine.step_scale, engine.on_trial, engine.line = scale, False, NO_LINE


def smoothed(old: float, new: float) -> float:
    """Exponential mean; the first value counts whole."""
    return new if old == 0.0 else old + SMOOTHING * (new - old)


def shared_part(engine: LeasedEngine, *, waiting: bool) -> float:
    """Part of a busy engine's time that one engine more would share: all of it while samples wait or it is full, else
    what its batch adds to a step."""
    return 1.0 if waiting or len(engine.running) >= engine.capacity.max_running else batched_part(engine)


def batched_part(engine: LeasedEngine) -> float:
    """Part of a busy engine's time that its batch adds to a step; a sample that runs alone is not divided."""
    running = len(engine.running)
    return running / ((engine.half_batch or HALF_BATCH) + running) if running > 1 else 0.0


def pause_window(engine: LeasedEngine, at: float) -> None:
    """Part of `apply`: until its next token after `at` comes, what passes says nothing of its speed."""
    # Just after `at`: its last token may have come at that very moment, if the next sample follows upon one that ends.
    _begin_window(engine, nextafter(at, inf))


def observe_tokens(engine: LeasedEngine, tokens: int, decoding: int, at: float) -> None:
    """Part of `apply`: `tokens` came from the `decoding` samples of `engine` that had given one before. First tokens
    say when a prompt was read, after all that was read before it, and nothing of a step."""
    if at < engine.window_at:
        pass  # of what has piled up: it came when it could be read, and not when it was made
    elif engine.token_at < engine.window_at or (engine.reading and engine.step_scale):
        _begin_window(engine, at)  # reading takes its time from decoding, and is counted on its own
    else:
        engine.window_tokens += tokens
        engine.window_load += decoding * (at - engine.token_at)
        if at - engine.window_at >= WINDOW_S and engine.window_tokens:
            _observe_window(engine, at - engine.window_at)
            _begin_window(engine, at)
    engine.token_at = at


def _begin_window(engine: LeasedEngine, at: float) -> None:
    engine.window_at, engine.window_tokens, engine.window_load = at, 0, 0.0


def _observe_window(engine: LeasedEngine, seconds: float) -> None:
    running = engine.window_load / seconds
    step = engine.window_load / engine.window_tokens
    if engine.on_trial or engine.line == NO_LINE:
        engine.on_trial, engine.step_scale, engine.tokens_per_s, engine.line = False, 0.0, 0.0, NO_LINE
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


def begin_reading(engine: LeasedEngine, tokens: int, at: float) -> int:
    """Part of `apply`: an assignment with `tokens` to read begins; returns those to be measured."""
    if tokens < MIN_READ:
        return 0
    if not engine.reading:
        engine.read_from, engine.read_tokens = at, 0
    engine.reading += 1
    engine.unread += tokens
    return tokens


def stop_reading(engine: LeasedEngine, tokens: int) -> None:
    """Part of `apply`: an assignment with `tokens` to read is over, or has its first token."""
    engine.reading -= 1
    engine.unread -= tokens


def end_reading(engine: LeasedEngine, tokens: int, at: float) -> None:
    """Part of `apply`: the first token after `tokens` has come. One observation per time of reading without a pause:
    whether an engine reads prompts one by one or together, the last first token comes when all are read."""
    stop_reading(engine, tokens)
    engine.read_at = at
    engine.read_tokens += tokens
    if not engine.reading and at > engine.read_from:
        engine.prefill_s = smoothed(engine.prefill_s, (at - engine.read_from) / engine.read_tokens)


def expected_tokens(state: LedgerState, sample: SampleState) -> int:
    """Tokens that engines will still generate in this turn, never more than the budget leaves."""
    left = state.groups[sample.group].group.sampling.max_new_tokens - sample.generated
    if not state.lengths.is_known:
        return max(1, left)
    return state.lengths.outlook.remaining(sample.length - sample.turn_start, left)
