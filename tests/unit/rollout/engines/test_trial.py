"""How an engine is tried before its first sample: what is asked of it, what is said of it, and what it may cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from polyrl.wire import EngineCapacity
from polyrl_rollout.engines import trial
from polyrl_rollout.engines.port import EngineFailed, GenerateRequest, RequestRejected, TokenChunk
from polyrl_rollout.engines.trial import Trial, TrialWatch, try_engine
from polyrl_rollout.testing.fake_engine import VOCABULARY, FakeEngine

CONTEXT = 4096


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


class Recording(FakeEngine):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(EngineCapacity(max_running=4, kv_tokens=1 << 16, max_context=CONTEXT))
        self.requests: list[GenerateRequest] = []
        self.answers: list[int] = []
        """Tokens after which the model ends each; all where nothing is said."""
        self.first_delay_s = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        self.requests.append(request)
        most = self.answers.pop(0) if self.answers else request.max_new_tokens
        await asyncio.sleep(self.first_delay_s if len(self.requests) == 1 else 0.0)
        async for chunk in super().generate(replace(request, max_new_tokens=most)):
            yield chunk


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        pytest.param([], Trial(), id="nothing came"),
        pytest.param([(1, 2.0)], Trial(), id="one token, and no step"),
        pytest.param([(4, 2.0)], Trial(), id="of the first chunk nobody knows when each token was made"),
        pytest.param([(1, 2.0), (1, 2.5)], Trial(0.5, 0.01), id="a step"),
        pytest.param([(1, 2.0), (4, 4.0), (4, 6.0)], Trial(0.5, 0.01), id="several to a chunk"),
    ],
)
def test_reading_ends_with_the_first_token_and_steps_begin(
    chunks: Sequence[tuple[int, float]], expected: Trial
) -> None:
    watch = TrialWatch(1.0, read=100)
    for tokens, at in chunks:
        watch.note(tokens, at)
    assert watch.trial() == expected


async def test_an_engine_is_asked_for_a_few_tokens_of_the_middle_of_its_vocabulary(model: Path) -> None:
    engine = Recording()
    tried = await try_engine(engine, model, CONTEXT)
    assert [len(request.input_ids) for request in engine.requests] == [trial.FIRST_TOKENS, trial.READ_TOKENS]
    for request in engine.requests:
        assert request.max_new_tokens == trial.NEW_TOKENS
        assert min(request.input_ids) >= VOCABULARY // 4
        assert max(request.input_ids) <= VOCABULARY // 2
    assert min(tried.step_s, tried.read_s) > 0


async def test_no_prompt_is_read_twice(model: Path) -> None:
    """What an engine has read before, it reads in no time."""
    engine = Recording()
    for number in range(3):
        await try_engine(engine, model, CONTEXT, number)
    assert len({tuple(request.input_ids[:8]) for request in engine.requests}) == len(engine.requests) == 6
    assert len({request.rid for request in engine.requests}) == 6


async def test_what_the_first_request_finds_is_not_what_is_said(model: Path) -> None:
    """Kernels are compiled and memory is found for it."""
    engine = Recording()
    engine.first_delay_s = 0.2
    tried = await try_engine(engine, model, CONTEXT)
    assert tried.read_s * trial.READ_TOKENS < 0.2


async def test_of_one_that_got_no_further_than_the_first_the_step_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TRIES", 1)
    tried = await try_engine(Recording(), model, CONTEXT)
    assert tried.step_s > 0
    assert tried.read_s == 0


async def test_a_model_that_ends_its_answer_at_once_is_asked_again(model: Path) -> None:
    engine = Recording()
    engine.answers = [1, 1, 16]
    assert (await try_engine(engine, model, CONTEXT)).step_s > 0
    assert len(engine.requests) == 3
    engine.requests, engine.answers = [], [1] * trial.TRIES
    assert await try_engine(engine, model, CONTEXT) == Trial()
    assert len(engine.requests) == trial.TRIES


async def test_a_small_context_holds_prompt_and_tokens(model: Path) -> None:
    engine = Recording()
    await try_engine(engine, model, 64)
    assert [len(request.input_ids) + request.max_new_tokens for request in engine.requests] == [32, 64]


@pytest.mark.parametrize("error", [EngineFailed("out of memory"), RequestRejected("too long")])
async def test_an_engine_that_fails_is_not_known(model: Path, error: Exception) -> None:
    engine = FakeEngine()
    engine.raises = error
    assert await try_engine(engine, model, CONTEXT) == Trial()


async def test_a_folder_without_a_config_is_no_end(tmp_path: Path) -> None:
    assert await try_engine(FakeEngine(), tmp_path, CONTEXT) == Trial()


async def test_an_error_of_our_own_is_not_hidden(model: Path) -> None:
    engine = FakeEngine()
    engine.raises = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError, match="ours"):
        await try_engine(engine, model, CONTEXT)


async def test_a_slow_engine_is_tried_no_longer_and_what_came_counts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LONGEST_S", 0.2)
    monkeypatch.setattr(trial, "ENDS_S", 0.1)
    engine = FakeEngine(tokens_per_second=20.0, chunk_tokens=1)
    async with asyncio.timeout(5):
        tried = await try_engine(engine, model, CONTEXT)
    assert tried.step_s > 0
    await engine.load_weights(1, model)  # which it refuses while requests run


async def test_a_trial_whose_agent_ends_ends_with_it(model: Path) -> None:
    """Else it asks on of an engine that is being closed."""
    engine = FakeEngine()
    engine.hang.set()
    task = asyncio.create_task(try_engine(engine, model, CONTEXT))
    await asyncio.wait((task,), timeout=0.1)
    assert engine.begun == 1
    task.cancel()
    await asyncio.wait((task,))
    await asyncio.sleep(0.01)
    await engine.load_weights(1, model)  # which it refuses while requests run
