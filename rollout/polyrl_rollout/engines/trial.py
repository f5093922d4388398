"""How fast an engine is, tried by its agent: else a sample shows it, and waits for a slow one meanwhile.

Before the first sample, and again whenever it has had nothing to do for AGAIN_S: a throttled device cools down, a
neighbour comes or leaves. A prompt is read and a few tokens are made of it, as of any request; nobody gets them. The
first one finds what is not compiled or loaded yet, and counts only where no other does. The manager begins with what is
said of them: the engine's next samples replace that.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from polyrl.sample import SamplingParams
from polyrl_rollout.engines.port import EngineFailed, GenerateRequest, InferenceEngine, RequestRejected, read_limits

FIRST_TOKENS: Final = 16
"""Tokens of the first prompt."""
READ_TOKENS: Final = 512
"""Tokens of the other prompts: reading so many takes longer than what surrounds it. Fewer if a context holds less."""
TRIES: Final = 4
"""With the first: a model may end its answer at once."""
AGAIN_S: Final = 20.0
"""Without work for so long an engine is tried anew: what the manager knows of it must not get old (`speed.STALE_S`)."""
NEW_TOKENS: Final = 16
"""Fifteen steps: their mean is what matters, and an engine that needs 30 ms for each is half a second later."""
LONGEST_S: Final = 2.0
"""For all of them, a tenth of what a start takes. What came until then counts, if it is two tokens."""
ENDS_S: Final = 5.0
"""For the end of the request after that; an engine that does not end it is not waited for."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Trial:
    """What was seen; 0 is not known."""

    step_s: float = 0.0
    """Seconds per decoding step of one sequence."""
    read_s: float = 0.0
    """Seconds per token of a prompt."""


class TrialWatch:
    """When tokens came of a prompt of `read` tokens."""

    def __init__(self, now: float, read: int) -> None:
        self._begun, self._read = now, read
        self._first = self._last = now
        self._tokens = 0

    def note(self, tokens: int, now: float) -> None:
        """Tokens came. Those of the first chunk say when the prompt was read, and nothing of a step."""
        if self._first == self._begun:
            self._first = now
        else:
            self._tokens += tokens
        self._last = now

    def trial(self) -> Trial:
        """What was seen so far."""
        if not self._tokens:
            return Trial()
        return Trial((self._last - self._first) / self._tokens, (self._first - self._begun) / self._read)


async def try_engine(engine: InferenceEngine, model_folder: Path, max_context: int, number: int = 0) -> Trial:
    """Takes LONGEST_S and ENDS_S at most. An engine that fails is no matter of this: its first sample, or the next look
    at its health, says so. `number`: another one each time, since a prompt that was read before is not read again."""
    watches: list[TrialWatch] = []
    task = asyncio.create_task(_watch_tries(engine, model_folder, max_context, number, watches))
    try:
        await asyncio.wait((task,), timeout=LONGEST_S)
    finally:
        task.cancel()
        await asyncio.wait((task,), timeout=ENDS_S)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        if not isinstance(error, EngineFailed | RequestRejected):
            raise error
        log.warning("the engine could not be tried", error=str(error))
    first, *others = [watch.trial() for watch in watches] or [Trial()]
    return next((one for one in reversed(others) if one.step_s), Trial(first.step_s))


async def _watch_tries(
    engine: InferenceEngine, model_folder: Path, max_context: int, number: int, watches: list[TrialWatch]
) -> None:
    """Until one after the first shows a step."""
    loop, longest = asyncio.get_running_loop(), max(1, max_context - NEW_TOKENS)
    for each in range(TRIES):
        read = min(READ_TOKENS if each else FIRST_TOKENS, longest)
        request = _request(model_folder, TRIES * number + each, read)
        watch = TrialWatch(loop.time(), read)
        watches.append(watch)
        async with aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.ids:
                    watch.note(len(chunk.ids), loop.time())
        if each and watch.trial().step_s:
            return


def _request(model_folder: Path, number: int, read: int) -> GenerateRequest:
    vocabulary = read_limits(model_folder).vocab_size
    # Not from the ends of a vocabulary, where models keep what begins pictures and turns.
    ids = random.Random(number).choices(range(vocabulary // 4, vocabulary // 2 + 1), k=read)
    sampling = SamplingParams(NEW_TOKENS)
    return GenerateRequest(f"trial-{number:010d}", ids, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=number)
