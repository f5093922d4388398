"""The port between an agent and whatever generates: start, generate, abort, load weights, health, close.

Token ids go in, increments of token ids with their logprobs and weight version come out. One conformance suite runs on
every implementation. An implementation raises only the errors of this module: `RequestRejected` is about the request,
`EngineFailed` about the engine, and the two never mix, because only the first may end a sample.

What every implementation checks before it generates is here too: `read_limits`, `check_request`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from polyrl.errors import PolyRLError
from polyrl.sample import Finish, SamplingParams
from polyrl.weights.engine_sums import EngineSum
from polyrl.wire import EngineCapacity

NO_VERSION: Final = -1
"""`InferenceEngine.version` before the first `load_weights`."""


class EngineFailed(PolyRLError):
    """The engine, not the request: it died, hangs, ran out of memory, or could not load weights."""


class EngineLost(EngineFailed):
    """It was killed or not ready in time, which says nothing about its settings: another start may do better."""


class RequestRejected(PolyRLError):
    """The request, not the engine: too long, malformed, tokens outside the vocabulary."""


@dataclass(frozen=True)
class GenerateRequest:
    """Generate on from `input_ids`."""

    rid: str
    """Unique for the life of the engine, of fixed width: SGLang aborts by prefix."""
    input_ids: list[int]
    max_new_tokens: int
    """At least 1; overrides `sampling.max_new_tokens`, which counts the whole sample."""
    sampling: SamplingParams
    seed: int
    """Seed of this sample's draws, 63 bits; overrides `sampling.seed`, which its siblings share. What is drawn at a
    position depends on it alone, where the engine can."""


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


@dataclass(frozen=True)
class LoadSeconds:
    """Where the time of one load went, and what the engine holds then."""

    wait: float
    """Until nothing was generated any more, and until it could be again."""
    load: float
    """Reading and taking the weights."""
    verify: float
    """Whether they fit the model, before the first is taken, beside requests that are kept; and what the engine adds
    them up to then. That their bytes are the version's is checked as they are pulled."""
    sum: EngineSum | None = None
    """None: it says nothing."""


class InferenceEngine(Protocol):
    """One engine, driven by one agent on one event loop.

    Example, with the engine that tests use; the real ones are `EmbeddedEngine` and `SGLangEngine`:

        >>> import asyncio
        >>> from polyrl_rollout.testing.fake_engine import FakeEngine
        >>> async def generate(engine: InferenceEngine, model: Path, prompt: list[int]) -> list[int]:
        ...     await engine.start(model)
        ...     await engine.load_weights(1, model)
        ...     sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
        ...     request = GenerateRequest("request-01", prompt, max_new_tokens=8, sampling=sampling, seed=0)
        ...     tokens: list[int] = []
        ...     try:
        ...         async for chunk in engine.generate(request):
        ...             assert chunk.version == 1 and len(chunk.ids) == len(chunk.logprobs)
        ...             tokens += chunk.ids
        ...     finally:
        ...         await engine.close()
        ...     return tokens
        >>> len(asyncio.run(generate(FakeEngine(), Path("model"), [1, 2, 3])))
        8
    """

    version: int
    """Weight version that generates now; NO_VERSION before the first `load_weights`."""
    keeps: bool
    """Whether requests that run at a load go on with the new weights, from the keys and values that they have."""
    sleeps: bool
    """Whether it is worth letting sleep: it holds memory of a device that others need at times."""

    async def start(self, model_folder: Path) -> EngineCapacity:
        """Starts with the architecture and tokenizer of a Hugging Face folder. Raises EngineFailed."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """Streams chunks until one has `finish`; ends without it when the request was aborted. Closing it early ends
        the request.

        Raises RequestRejected or EngineFailed, the latter also when no chunk comes within the engine's own deadline.
        """

    async def abort(self, rid: str) -> None:
        """Ends a request's stream; an unknown rid is fine. Raises EngineFailed."""

    async def load_weights(self, version: int, folder: Path) -> LoadSeconds:
        """Serves the weights of a Hugging Face folder from now on as `version`; returns what that took.

        Requests that run are ended, or go on where the engine `keeps` them; of those each chunk still has the version
        that made its tokens. A prompt that comes later reuses nothing that other weights computed. Raises EngineFailed;
        then the old weights and `version` stay.
        """

    async def sleep(self) -> None:
        """Ends all requests, and gives the device what memory it can back; until `wake` it serves nothing, and
        `version` is NO_VERSION. Raises EngineFailed; then nobody knows what it holds, and it must be closed."""

    async def wake(self, version: int, folder: Path) -> LoadSeconds:
        """Takes memory again, and serves the weights of `folder` as `version`: what slept is void. Raises EngineFailed,
        as `sleep` does."""

    async def health(self) -> None:
        """Raises EngineFailed when the engine does not answer within its own deadline, asleep or awake."""

    async def close(self) -> None:
        """Ends the engine and whatever it started; idempotent."""


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model's inputs, from its config.json."""

    vocab_size: int
    max_positions: int
    """Longest prompt + response that its position encoding was made for, in tokens."""


def read_limits(model_folder: Path) -> ModelLimits:
    """Reads config.json. Raises EngineFailed naming the file when it cannot be used."""
    path = model_folder / "config.json"
    try:
        config = json.loads(path.read_text())
        text = config.get("text_config", config)
        return ModelLimits(int(text["vocab_size"]), int(text["max_position_embeddings"]))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise EngineFailed(f"{path} is not a usable model config: {error!r}") from error


def check_request(request: GenerateRequest, vocab_size: int, max_context: int) -> None:
    """Raises RequestRejected when the request can never be generated by this model."""
    if not request.input_ids:
        raise RequestRejected(f"request {request.rid} has no input tokens")
    if request.max_new_tokens < 1:
        raise RequestRejected(f"request {request.rid} asks for {request.max_new_tokens} tokens; at least 1 is possible")
    total = len(request.input_ids) + request.max_new_tokens
    if total > max_context:
        raise RequestRejected(
            f"request {request.rid} needs {len(request.input_ids)} + {request.max_new_tokens} = {total} tokens; "
            f"this engine's context holds {max_context}"
        )
    if min(request.input_ids) < 0 or max(request.input_ids) >= vocab_size:
        raise RequestRejected(f"request {request.rid} has tokens outside the vocabulary of {vocab_size}")
