"""What an environment is: a coroutine that plays one episode. Token in, token out: what it writes is encoded once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from polyrl_trainer.sample import Sample

Generate = Callable[..., Awaitable[Sample]]
"""`generate(text, reward=0.0)` writes text after the policy's turn, lets the policy go on, and gives the sample with
its next turn at the end. `reward`: what the turn was worth, see `Sample.turn_rewards`."""


@dataclass(frozen=True)
class Ending:
    """What `run` may return."""

    reward: float = 0.0
    """What the last turn was worth."""
    truncated: bool = False
    """The episode was cut, not solved or failed: the sample's finish_reason is `length`."""


class Environment(Protocol):
    """One object per run, made without arguments; `run` is called once per sample, many at the same time.

    >>> import asyncio, dataclasses
    >>> import numpy as np
    >>> class Guess:
    ...     async def run(self, sample, generate):
    ...         while sample.response[-1:] != sample.metadata["secret"]:
    ...             sample = await generate(" wrong, again:")
    >>> first = Sample(np.array([1]), np.array([0], np.float32), 1, response="7", metadata={"secret": "8"})
    >>> async def generate(text):
    ...     print("environment:" + text)
    ...     return dataclasses.replace(first, response=first.response + text + "8")
    >>> asyncio.run(Guess().run(first, generate))
    environment: wrong, again:
    """

    async def run(self, sample: Sample, generate: Generate) -> Ending | None:
        """Plays one episode: `sample` is the prompt with the policy's first turn. Returning ends the episode.

        What it raises discards the sample with reason environmentFailed. After a restart of the trainer a fresh one
        is led through the recorded turns: it must write again what it wrote, or the sample is discarded with reason
        environmentDiverged and its prompt is submitted anew. Its other effects then happen twice.
        """
