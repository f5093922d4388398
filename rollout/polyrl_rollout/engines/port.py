"""The port between an agent and whatever generates: start, generate, abort, load weights, health, close.

Token ids go in, increments of token ids with their logprobs and weight version come out. One conformance suite runs on
every implementation. An implementation raises only the errors of this module: `RequestRejected` speaks of the request,
`EngineFailed` speaks of the engine, and the two never mix, because only the first may end a sample.

Refuses to hold: text, prompts, placement, retries, weight transport (see `puller`). Read next: `fake_engine`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from polyrl.errors import PolyRLError
from polyrl.sample import Finish, SamplingParams

NO_VERSION: Final = -1
"""What `Engine.version` says before the first `load_weights`."""


class EngineError(PolyRLError):
    """Root of what engines raise."""


class EngineFailed(EngineError):
    """The engine, not the request: it died, hangs, ran out of memory, or could not load weights."""


class RequestRejected(EngineError):
    """The request, not the engine: too long, malformed, tokens outside the vocabulary."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself once it has started."""

    max_running: int
    """Sequences it runs at once."""
    kv_tokens: int
    """KV-cache room, in tokens."""
    max_context: int
    """Longest prompt + response, in tokens."""


@dataclass(frozen=True)
class GenerateRequest:
    """Generate on from `input_ids`."""

    rid: str
    """Unique for the life of the engine, of fixed width: SGLang aborts by prefix."""
    input_ids: list[int]
    max_new_tokens: int
    """At least 1; overrides `sampling.max_new_tokens`, which counts the whole sample."""
    sampling: SamplingParams


@dataclass(frozen=True)
class TokenChunk:
    """New tokens of one request since its last chunk: incremental, never cumulative."""

    ids: list[int]
    logprobs: list[float]
    """As many as `ids`; see `polyrl.sample.SamplingParams` for their meaning."""
    version: int
    """Weight version that made all of `ids`."""
    finish: Finish | None
    """Set on the last chunk only, which may hold no tokens."""


class Engine(Protocol):
    """One engine, driven by one agent on one event loop."""

    version: int
    """Weight version that generates now; NO_VERSION before the first `load_weights`."""

    async def start(self, model_folder: Path) -> EngineInfo:
        """Starts with the architecture and tokenizer of a Hugging Face folder. Raises EngineFailed."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Streams chunks until one has `finish`; ends without it when the request was aborted.

        Raises RequestRejected or EngineFailed, the latter also when no chunk comes within the engine's own deadline.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Ends a request's stream; an unknown rid is fine. Raises EngineFailed."""
        ...

    async def load_weights(self, version: int, folder: Path) -> None:
        """Serves the weights of a Hugging Face folder from now on as `version`.

        The caller has aborted all running requests. Raises EngineFailed; then the old weights and `version` stay.
        """
        ...

    async def health(self) -> None:
        """Raises EngineFailed when the engine does not answer within its own deadline."""
        ...

    async def close(self) -> None:
        """Ends the engine and whatever it started; idempotent."""
        ...
