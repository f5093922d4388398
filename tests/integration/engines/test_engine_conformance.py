"""What every engine must do, whatever it is made of: one suite, run on the embedded engine and on the real SGLang.

The judge is plain transformers, one sequence at a time without a cache. SGLang's half is marked `sglang` and runs by
`make test-sglang`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from polyrl.manifest.rollout import EngineSpec, EngineType, WeightSwitch
from polyrl.sample import Finish, SamplingParams
from polyrl_rollout.agent.__main__ import choose_engine
from polyrl_rollout.engines.port import (
    NO_VERSION,
    EngineFailed,
    GenerateRequest,
    InferenceEngine,
    RequestRejected,
    TokenChunk,
)
from polyrl_rollout.engines.sglang.engine import SGLangEngine
from polyrl_rollout.engines.streams import SILENCE_DEADLINE_S
from polyrl_rollout.engines.trial import try_engine

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

SLEEPS_ON_CPU = Path(__file__).parents[2] / "sglang" / "sleep"
VOCAB = 64
EOS = 63
MAX_CONTEXT = 480
SERVER_PROCESSES = 2
"""That a server of SGLang's starts beside itself: a scheduler and a detokenizer."""
TOLERANCE = 2e-4
"""Of a logprob in float32, over different orders of summation."""
GREEDY = SamplingParams(0, temperature=0.0)
CPU_ARGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--skip-server-warmup", "--disable-overlap-schedule", "--max-total-tokens", "32768"),
]
ENGINES = [pytest.param("embedded", id="embedded"), pytest.param("sglang", id="sglang", marks=pytest.mark.sglang)]


def spec_of(kind: str, switch: WeightSwitch = WeightSwitch.RECOMPUTE) -> EngineSpec:
    args = CPU_ARGS if kind == "sglang" else []
    return EngineSpec(
        type=EngineType(kind),
        max_running=64,
        kv_tokens=32768,
        max_context=MAX_CONTEXT,
        args=args,
        weight_switch=switch,
    )


@dataclass
class Models:
    """Two sets of weights of one architecture, and a third folder that fits neither."""

    folders: list[Path]
    plain: list[PreTrainedModel]
    misfit: Path

    @torch.no_grad()
    def logits(self, weights: int, ids: list[int]) -> torch.Tensor:
        """float32[len(ids), VOCAB]"""
        return self.plain[weights](torch.tensor([ids])).logits[0].float()

    @torch.no_grad()
    def greedy(self, weights: int, prompt: list[int], budget: int, stops: tuple[int, ...] = ()) -> list[int]:
        cache = DynamicCache(config=self.plain[weights].config)
        ids, unread = list[int](), prompt
        while len(ids) < budget and not (ids and ids[-1] in (EOS, *stops)):
            scores = self.plain[weights](torch.tensor([unread]), past_key_values=cache).logits[0, -1]
            ids.append(int(scores.argmax()))
            unread = ids[-1:]
        return ids

    def logprobs(self, weights: int, prompt: list[int], output: list[int], temperature: float) -> list[float]:
        scores = self.logits(weights, prompt + output)[len(prompt) - 1 : -1] / (temperature or 1.0)
        return torch.log_softmax(scores, -1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()

    @torch.no_grad()
    def switched_logprobs(self, prompt: list[int], output: list[int], cut: int) -> list[float]:
        """Of what is drawn after `cut` tokens by the second weights from the first ones' keys and values, which the
        last of those tokens is not yet among."""
        read, rest = prompt + output[: cut - 1], output[cut - 1 : -1]
        cache = DynamicCache(config=self.plain[0].config)
        self.plain[0](torch.tensor([read]), past_key_values=cache)
        scores = self.plain[1](torch.tensor([rest]), past_key_values=cache).logits[0].float()
        return torch.log_softmax(scores, -1).gather(1, torch.tensor(output[cut:])[:, None])[:, 0].tolist()

    def lasting(self, count: int, budget: int) -> list[list[int]]:
        """Prompts whose greedy output under the first weights does not end before `budget`."""
        found: list[list[int]] = []
        seed = 0
        while len(found) < count:
            prompt = prompt_of(seed)
            seed += 1
            if len(self.greedy(0, prompt, budget)) == budget:
                found.append(prompt)
        return found


def prompt_of(seed: int, length: int = 10) -> list[int]:
    return torch.randint(0, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_model(folder: Path, seed: int, hidden: int = 64) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.15,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    plain = [save_model(root / f"weights-{seed}", seed) for seed in range(2)]
    save_model(root / "misfit", 2, hidden=32)
    return Models([root / "weights-0", root / "weights-1"], plain, misfit=root / "misfit")


async def started(
    kind: str, models: Models, version: int, switch: WeightSwitch = WeightSwitch.RECOMPUTE
) -> InferenceEngine:
    engine = choose_engine(spec_of(kind, switch))
    try:
        assert engine.version == NO_VERSION
        info = await engine.start(models.folders[0])
        assert info.max_context == MAX_CONTEXT
        await engine.load_weights(version, models.folders[0])
    except BaseException:
        await engine.close()
        raise
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def kind(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SLEEPS_ON_CPU), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")  # Whoever starts an agent may have set it.
        yield str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(kind: str, models: Models) -> AsyncIterator[InferenceEngine]:
    one = await started(kind, models, version=1)
    yield one
    processes = tree(one.pid)  # type: ignore[attr-defined]
    await one.close()
    await assert_gone(processes)
    await one.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spare(kind: str, models: Models) -> AsyncIterator[InferenceEngine]:
    """A second engine of the same kind, which keeps what runs at a load; dies in the last test."""
    one = await started(kind, models, version=1, switch=WeightSwitch.KEEP)
    yield one
    await one.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stranger(models: Models) -> AsyncIterator[InferenceEngine]:
    """An engine that may be of another kind."""
    one = await started("embedded", models, version=1)
    yield one
    await one.close()


@dataclass
class Output:
    """Everything one request streamed."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chunks: list[TokenChunk] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finish(self) -> Finish | None:
        return self.chunks[-1].finish if self.chunks else None

    @property
    def versions(self) -> set[int]:
        return {chunk.version for chunk in self.chunks}


RIDS = iter(range(10**8))


def new_request(prompt: list[int], budget: int, sampling: SamplingParams = GREEDY) -> GenerateRequest:
    number = next(RIDS)
    return GenerateRequest(f"{number:08d}", prompt, max_new_tokens=budget, sampling=sampling, seed=number)


async def collect(engine: InferenceEngine, request: GenerateRequest, into: Output | None = None) -> Output:
    output = into if into is not None else Output()
    async for chunk in engine.generate(request):
        assert output.finish is None, "a chunk after the finish"
        assert len(chunk.ids) == len(chunk.logprobs)
        output.chunks.append(chunk)
        output.ids += chunk.ids
        output.logprobs += chunk.logprobs
        output.begun.set()
    return output


async def run(engine: InferenceEngine, prompt: list[int], budget: int, sampling: SamplingParams = GREEDY) -> Output:
    return await collect(engine, new_request(prompt, budget, sampling))


async def first_tokens(*outputs: Output) -> None:
    """Waits until every output has begun."""
    async with asyncio.timeout(30):
        await asyncio.gather(*(output.begun.wait() for output in outputs))


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def spawned(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that Python has spawned for another, and that have not given themselves a name yet."""
    found = []
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("multiprocessing.spawn" in word for word in one.cmdline()):
                found.append(one)
    return found


async def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=15)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


async def test_tokens_come_one_by_one_and_equal_plain_greedy_decoding(engine: InferenceEngine, models: Models) -> None:
    (prompt,) = models.lasting(1, 40)
    output = await run(engine, prompt, 40)
    assert output.ids == models.greedy(0, prompt, 40)
    assert len(output.chunks) > 10
    assert [chunk.finish for chunk in output.chunks[:-1]] == [None] * (len(output.chunks) - 1)
    assert output.finish is Finish.LENGTH


async def test_it_is_tried(engine: InferenceEngine, models: Models) -> None:
    tried = await try_engine(engine, models.folders[0], MAX_CONTEXT)
    assert min(tried.step_s, tried.read_s) > 0


async def test_a_trial_that_is_cut_short_leaves_nothing_behind(engine: InferenceEngine, models: Models) -> None:
    """Weights are loaded after it, which an engine may refuse while something runs, and it is tried again."""
    for number, seconds in enumerate((0.0, 0.02, 0.1), 1):
        trial = asyncio.create_task(try_engine(engine, models.folders[0], MAX_CONTEXT, number))
        await asyncio.sleep(seconds)
        trial.cancel()
        await asyncio.wait((trial,))
        await engine.load_weights(engine.version, models.folders[0])
    assert (await try_engine(engine, models.folders[0], MAX_CONTEXT, 4)).step_s > 0


async def test_nothing_but_its_health_answers_without_the_key(engine: InferenceEngine) -> None:
    if not isinstance(engine, SGLangEngine):
        return  # has no port
    assert engine._session is not None
    url = engine._session._base_url
    assert url is not None
    async with aiohttp.ClientSession(url) as stranger:
        asked = [("GET", "/server_info"), ("POST", "/generate"), ("POST", "/update_weights_from_disk")]
        asked += [("POST", "/load_lora_adapter_from_tensors"), ("POST", "/update_weights_from_tensor")]
        for method, path in asked:
            async with stranger.request(method, path, json={}) as answer:
                assert answer.status == 401, path


@pytest.mark.parametrize("budget", [1, 2, 17])
async def test_a_budget_is_used_up_exactly(engine: InferenceEngine, models: Models, budget: int) -> None:
    (prompt,) = models.lasting(1, 17)
    output = await run(engine, prompt, budget)
    assert (len(output.ids), output.finish) == (budget, Finish.LENGTH)


async def test_a_stop_token_is_kept_and_ends_the_turn(engine: InferenceEngine, models: Models) -> None:
    (prompt,) = models.lasting(1, 30)
    stop = models.greedy(0, prompt, 30)[12]
    output = await run(engine, prompt, 30, SamplingParams(30, temperature=0.0, stop_token_ids=(stop,)))
    assert output.ids == models.greedy(0, prompt, 30, (stop,))
    assert (output.ids[-1], output.finish) == (stop, Finish.STOP)


async def test_the_models_own_end_of_sequence_ends_the_turn(engine: InferenceEngine) -> None:
    hot = SamplingParams(0, temperature=3.0)
    outputs = await asyncio.gather(*(run(engine, prompt_of(seed), 100, hot) for seed in range(24)))
    for output in outputs:
        assert EOS not in output.ids[:-1]
        assert output.finish is (Finish.STOP if output.ids[-1] == EOS else Finish.LENGTH)
        assert output.finish is Finish.STOP or len(output.ids) == 100
    assert {output.finish for output in outputs} >= {Finish.STOP}


async def test_32_requests_at_once_do_not_disturb_each_other(engine: InferenceEngine, models: Models) -> None:
    prompts = [prompt_of(seed, length=3 + seed) for seed in range(32)]
    outputs = await asyncio.gather(*(run(engine, p, 5 + i) for i, p in enumerate(prompts)))
    assert [o.ids for o in outputs] == [models.greedy(0, p, 5 + i) for i, p in enumerate(prompts)]


SAMPLINGS = [
    GREEDY,
    SamplingParams(0, temperature=1.0),
    SamplingParams(0, temperature=0.7),
    SamplingParams(0, temperature=0.7, top_p=0.8),
    SamplingParams(0, temperature=1.3, top_k=5),
    SamplingParams(0, temperature=0.7, top_p=0.9, top_k=8),
]


async def test_logprobs_are_of_the_scaled_distribution_before_truncation(
    engine: InferenceEngine, models: Models
) -> None:
    """All kinds of sampling run in one batch, where one must not colour another."""
    cases = [(prompt_of(seed), SAMPLINGS[seed % len(SAMPLINGS)]) for seed in range(24)]
    outputs = await asyncio.gather(*(run(engine, prompt, 20, sampling) for prompt, sampling in cases))
    for (prompt, sampling), output in zip(cases, outputs, strict=True):
        expected = models.logprobs(0, prompt, output.ids, sampling.temperature)
        assert output.logprobs == pytest.approx(expected, abs=TOLERANCE), sampling
        assert_within_support(models, prompt, output.ids, sampling)


def assert_within_support(models: Models, prompt: list[int], ids: list[int], sampling: SamplingParams) -> None:
    probs = (models.logits(0, prompt + ids)[len(prompt) - 1 : -1] / (sampling.temperature or 1.0)).softmax(-1)
    for row, token in zip(probs, ids, strict=True):
        likelier = row[row > row[token]]
        assert sampling.top_k < 0 or len(likelier) < sampling.top_k
        assert float(likelier.sum()) <= sampling.top_p + 1e-5
        assert sampling.temperature > 0 or len(likelier) == 0


async def test_draws_follow_the_distribution(engine: InferenceEngine, models: Models) -> None:
    prompt, count = prompt_of(5), 1024
    one = SamplingParams(0, temperature=1.5)
    outputs = await asyncio.gather(*(run(engine, prompt, 1, one) for _ in range(count)))
    drawn = Counter(output.ids[0] for output in outputs)
    probs = (models.logits(0, prompt)[-1] / 1.5).softmax(-1).tolist()
    distance = sum(abs(drawn[token] / count - p) for token, p in enumerate(probs)) / 2
    # Expected for the right distribution: below sqrt(VOCAB / (2 pi count)) = 0.1, with a deviation of about 0.01.
    assert distance < 0.15
    assert max(probs) < 0.7, "the model must leave something to draw"


async def test_a_sample_that_moves_repeats_its_draws(
    engine: InferenceEngine, stranger: InferenceEngine, kind: str
) -> None:
    """By its seed and where a token stands, however many attempts it took to come there."""
    if kind != "embedded":
        pytest.skip("SGLang heeds a sample's seed with --enable-deterministic-inference only")
    for _ in range(20):
        request = new_request(prompt_of(5), 32, SamplingParams(0, temperature=1.5))
        whole = await collect(engine, request)
        if len(whole.ids) == 32:
            break  # by some seeds the end is drawn before
    for cut in (1, 7, 23):
        moved = replace(request, input_ids=request.input_ids + whole.ids[:cut], max_new_tokens=32 - cut)
        rest = await collect(stranger, moved)
        assert whole.ids[:cut] + rest.ids == whole.ids
    assert len(set(whole.ids)) > 3, "nothing was drawn"


@pytest.mark.parametrize("cut", [1, 7, 23])
@pytest.mark.parametrize("elsewhere", ["spare", "stranger"])
async def test_a_migrated_prefix_goes_on_as_if_undisturbed(
    engine: InferenceEngine, spare: InferenceEngine, stranger: InferenceEngine, models: Models, elsewhere: str, cut: int
) -> None:
    other = {"spare": spare, "stranger": stranger}[elsewhere]
    for prompt in models.lasting(3, 32):
        whole = await run(engine, prompt, 32)
        rest = await run(other, prompt + whole.ids[:cut], 32 - cut)
        assert whole.ids[:cut] + rest.ids == whole.ids
        assert whole.logprobs[cut:] == pytest.approx(rest.logprobs, abs=TOLERANCE)


async def test_an_aborted_stream_ends_and_others_go_on(engine: InferenceEngine, models: Models) -> None:
    requests = [new_request(prompt, 300) for prompt in models.lasting(4, 300)]
    outputs = [Output() for _ in requests]
    tasks = [asyncio.create_task(collect(engine, r, o)) for r, o in zip(requests, outputs, strict=True)]
    await first_tokens(*outputs)
    await engine.abort(requests[0].rid)
    await engine.abort("no-such-request")
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    assert outputs[0].finish is None
    assert 0 < len(outputs[0].ids) < 300
    assert [(len(o.ids), o.finish) for o in outputs[1:]] == [(300, Finish.LENGTH)] * 3


async def test_a_consumer_may_walk_away(engine: InferenceEngine, models: Models) -> None:
    (prompt,) = models.lasting(1, 300)
    stream = engine.generate(new_request(prompt, 300))
    async for chunk in stream:
        assert chunk.ids
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await run(engine, prompt, 8)).ids == models.greedy(0, prompt, 8)


async def test_new_weights_change_the_output_and_its_version(engine: InferenceEngine, models: Models) -> None:
    prompts = [prompt_of(seed) for seed in range(8)]
    for version, weights in ((2, 1), (3, 0), (7, 1), (8, 0)):
        await engine.load_weights(version, models.folders[weights])
        assert engine.version == version
        outputs = await asyncio.gather(*(run(engine, prompt, 12) for prompt in prompts))
        assert [o.ids for o in outputs] == [models.greedy(weights, prompt, 12) for prompt in prompts]
        assert {v for o in outputs for v in o.versions} == {version}
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = models.logprobs(weights, prompt, output.ids, 0)
            assert output.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert models.greedy(0, prompts[0], 12) != models.greedy(1, prompts[0], 12)


async def test_asleep_it_serves_nothing_and_it_wakes_with_other_weights(
    engine: InferenceEngine, models: Models
) -> None:
    (prompt,) = models.lasting(1, 300)
    output, version = Output(), engine.version
    task = asyncio.create_task(collect(engine, new_request(prompt, 300), output))
    await first_tokens(output)
    await engine.sleep()
    async with asyncio.timeout(10):
        await task
    assert (output.finish, engine.version) == (None, NO_VERSION)
    await engine.health()
    with pytest.raises(EngineFailed, match="no weights yet"):
        await run(engine, prompt, 4)
    with pytest.raises(EngineFailed, match="its weights sleep"):
        await engine.load_weights(version + 1, models.folders[1])
    assert (await engine.wake(version + 1, models.folders[1])).load > 0
    assert engine.version == version + 1
    assert (await run(engine, prompt + output.ids, 12)).ids == models.greedy(1, prompt + output.ids, 12)
    await engine.load_weights(version + 2, models.folders[0])


async def test_loading_ends_what_still_runs_and_what_goes_on_is_read_anew(
    engine: InferenceEngine, models: Models
) -> None:
    (prompt,) = models.lasting(1, 300)
    output, version = Output(), engine.version
    task = asyncio.create_task(collect(engine, new_request(prompt, 300), output))
    await first_tokens(output)
    begun = time.monotonic()
    seconds = await engine.load_weights(version + 1, models.folders[1])
    parts = (seconds.wait, seconds.load, seconds.verify)
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(time.monotonic() - begun, abs=0.05), "all of the load is in one of its parts"
    async with asyncio.timeout(10):
        await task
    assert (output.finish, output.versions) == (None, {version})
    rest = await run(engine, prompt + output.ids, 12)
    assert rest.versions == {version + 1}
    assert rest.logprobs == pytest.approx(models.logprobs(1, prompt + output.ids, rest.ids, 0), abs=TOLERANCE)
    await engine.load_weights(version + 2, models.folders[0])


async def test_what_runs_at_a_load_goes_on_from_what_the_old_weights_read(
    spare: InferenceEngine, models: Models
) -> None:
    """With `weightSwitch: keep`. Keys and values of both versions show in the logprobs, and so does a wrong stamp."""
    prompts = models.lasting(4, 300)
    outputs = [Output() for _ in prompts]
    tasks = [asyncio.create_task(collect(spare, new_request(p, 300), o)) for p, o in zip(prompts, outputs, strict=True)]
    await first_tokens(*outputs)
    await spare.load_weights(2, models.folders[1])
    async with asyncio.timeout(180):
        await asyncio.gather(*tasks)
    for prompt, output in zip(prompts, outputs, strict=True):
        versions = [chunk.version for chunk in output.chunks for _ in chunk.ids]
        assert (versions, set(versions)) == (sorted(versions), {1, 2})
        assert output.finish is (Finish.STOP if output.ids[-1] == EOS else Finish.LENGTH)
        cut = versions.index(2)
        assert output.ids[:cut] == models.greedy(0, prompt, cut)
        kept = models.switched_logprobs(prompt, output.ids, cut)
        assert output.logprobs[cut:] == pytest.approx(kept, abs=TOLERANCE)
        assert kept != pytest.approx(models.logprobs(1, prompt + output.ids[:cut], output.ids[cut:], 0), abs=0.01)


async def test_a_prompt_after_a_load_reuses_nothing_of_older_weights(spare: InferenceEngine, models: Models) -> None:
    for version, weights in ((3, 0), (4, 1), (5, 0)):
        await spare.load_weights(version, models.folders[weights])
        for prompt in (prompt_of(5, 40), prompt_of(5, 40)[:30]):
            output = await run(spare, prompt, 12)
            assert (output.ids, output.versions) == (models.greedy(weights, prompt, 12), {version})
            expected = models.logprobs(weights, prompt, output.ids, 0)
            assert output.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_a_load_that_fails_lets_what_runs_go_on(spare: InferenceEngine, models: Models) -> None:
    (prompt,) = models.lasting(1, 300)
    output, version = Output(), spare.version
    task = asyncio.create_task(collect(spare, new_request(prompt, 300), output))
    await first_tokens(output)
    with pytest.raises(EngineFailed, match="cannot load version 99"):
        await spare.load_weights(99, models.misfit)
    async with asyncio.timeout(180):
        await task
    assert (output.ids, output.versions) == (models.greedy(0, prompt, 300), {version})


async def test_weights_that_do_not_fit_leave_the_old_ones_serving(
    engine: InferenceEngine, models: Models, tmp_path: Path
) -> None:
    version, prompt = engine.version, prompt_of(3)
    for folder in (tmp_path / "absent", models.misfit):
        with pytest.raises(EngineFailed, match=f"cannot load version 99 from .*{folder.name}"):
            await engine.load_weights(99, folder)
        assert engine.version == version
        output = await run(engine, prompt, 12)
        assert output.ids == models.greedy(0, prompt, 12)
        assert output.versions == {version}


@pytest.mark.parametrize(
    ("prompt", "budget"),
    [([1] * 10, MAX_CONTEXT - 9), ([1] * (MAX_CONTEXT + 1), 1), ([], 4), ([1, VOCAB], 4), ([-1], 4), ([1], 0)],
    ids=[
        "budget above context",
        "prompt above context",
        "no prompt",
        "above vocabulary",
        "negative token",
        "no budget",
    ],
)
async def test_requests_that_cannot_be_are_rejected(engine: InferenceEngine, prompt: list[int], budget: int) -> None:
    with pytest.raises(RequestRejected):
        await run(engine, prompt, budget)


async def test_the_whole_context_can_be_used(engine: InferenceEngine, models: Models) -> None:
    sampling = SamplingParams(0, temperature=0.0)
    prompt = models.lasting(1, 300)[0]
    prompt = prompt + models.greedy(0, prompt, 300)
    output = await run(engine, prompt, MAX_CONTEXT - len(prompt), sampling)
    assert output.finish is Finish.STOP or len(prompt) + len(output.ids) == MAX_CONTEXT


async def test_health_is_answered_idle_and_busy(engine: InferenceEngine, models: Models) -> None:
    await engine.health()
    (prompt,) = models.lasting(1, 300)
    task = asyncio.create_task(run(engine, prompt, 300))
    await engine.health()
    assert len((await task).ids) == 300


async def test_an_idle_engine_leaves_the_cpu_alone(engine: InferenceEngine) -> None:
    def cpu_seconds() -> float:
        return sum(t.user + t.system for t in (p.cpu_times() for p in tree(engine.pid)))  # type: ignore[attr-defined]

    before = cpu_seconds()
    await asyncio.sleep(3)
    # SGLang's three processes wake often even when asked to sleep.
    assert (cpu_seconds() - before) / 3 < (0.02 if type(engine).__name__ == "EmbeddedEngine" else 0.2)


PARENT = """
import asyncio, sys
from pathlib import Path
from polyrl.manifest.rollout import EngineSpec
from polyrl_rollout.agent.__main__ import choose_engine

async def main():
    engine = choose_engine(EngineSpec.model_validate_json(sys.argv[1]))
    print("starts", flush=True)
    await engine.start(Path(sys.argv[2]))
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def parent_of(kind: str, models: Models) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that starts an engine: it says so, and then the engine's process id. It is killed."""
    spec = spec_of(kind).model_dump_json(by_alias=True)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, spec, str(models.folders[0]), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        async with asyncio.timeout(300):
            assert await parent.stdout.readline() == b"starts\n"
            yield parent
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        await parent.communicate()


async def test_no_process_outlives_a_killed_parent(kind: str, models: Models) -> None:
    async with parent_of(kind, models) as parent:
        assert parent.stdout is not None
        processes = tree(int(await parent.stdout.readline()))
    await assert_gone(processes)


@pytest.mark.sglang
async def test_no_process_outlives_a_parent_that_is_killed_while_they_start(models: Models) -> None:
    """SGLang's processes tie themselves to its server only when they have imported everything."""
    async with parent_of("sglang", models) as parent:
        while len(spawned(processes := tree(parent.pid))) < SERVER_PROCESSES:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
    await assert_gone(processes)


async def test_a_killed_engine_fails_its_streams_at_once(spare: InferenceEngine, models: Models) -> None:
    outputs = [Output() for _ in range(3)]
    prompts = models.lasting(3, 300)
    tasks = [asyncio.create_task(collect(spare, new_request(p, 400), o)) for p, o in zip(prompts, outputs, strict=True)]
    await first_tokens(*outputs)
    processes = tree(spare.pid)  # type: ignore[attr-defined]
    os.kill(spare.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    async with asyncio.timeout(SILENCE_DEADLINE_S / 2):
        endings = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(ending) for ending in endings] == [EngineFailed] * 3
    for call in (run(spare, prompts[0], 4), spare.health(), spare.load_weights(9, models.folders[0])):
        with pytest.raises(EngineFailed):
            async with asyncio.timeout(5):
                await call
    await assert_gone(processes)
    await spare.close()
