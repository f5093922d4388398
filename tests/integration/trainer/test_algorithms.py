"""Every algorithm learns on the real embedded engine and the real learner, and all its metrics are on their page."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from polyrl.manifest.parts.algorithm import AlgorithmName
from polyrl.manifest.recipe import LoggingSpec, RecipeSpec, SampleLogSpec
from polyrl.manifest.rollout import EngineSpec
from polyrl.sample import Group, Response, sample_seed
from polyrl.weights import WeightsRef
from polyrl.wire import unpack_ids
from polyrl_rollout.engines.embedded.engine import EmbeddedEngine
from polyrl_rollout.engines.port import GenerateRequest
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.checkpoints import Checkpoints
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.examples import prepare_prompts
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.generation.supply import GroupSupply
from polyrl_trainer.loops.critic import Critic, SharedCritic
from polyrl_trainer.loops.mini_batches import updates_per_step
from polyrl_trainer.loops.rl_loop import RlParts, run_rl_training
from polyrl_trainer.losses.own import NOTHING_OWN, OwnAlgorithm
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.sample import Sample
from polyrl_trainer.sample_log.log import SampleLog
from polyrl_trainer.session import Session, run_beside
from polyrl_trainer.state import TrainerState, TrainingStage
from polyrl_trainer.testing.backend_conformance import exported
from polyrl_trainer.testing.fake_rollouts import FakeRollouts
from polyrl_trainer.testing.inline_calls import InlineCalls
from polyrl_trainer.testing.memory_publisher import MemoryPublisher
from polyrl_trainer.user_code.own_algorithm import own_advantage, own_loss
from polyrl_trainer.user_code.rewards import Failures, RewardFunction
from polyrl_trainer.weights.policy_versions import PolicyVersions

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"
TOKENIZER = CharacterTokenizer("0123456789=")
STEPS = 5
SEED = 3
SOURCE = {
    "model_type": "qwen2", "vocab_size": TOKENIZER.vocabulary, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
MODEL = ModelConfig(SOURCE, seed=SEED, dtype="float32")


def backend_of(total_steps: int, model: ModelConfig = MODEL) -> TorchBackend:
    optimizer = OptimizerConfig(learning_rate=0.03, total_steps=total_steps)
    return create_torch_backend(model, EngineConfig("cpu"), optimizer, CheckpointConfig(fsync=False))


def critic_of(spec: RecipeSpec, backend: TorchBackend) -> Critic | None:
    if not spec.algorithm.uses_critic:
        return None
    if spec.algorithm.shares_trunk:
        return SharedCritic(backend, spec)
    return Critic(backend_of(100, replace(MODEL, head="value")), spec)


def write_model(folder: Path, backend: TorchBackend, tensors: Any = None) -> Path:
    folder.mkdir(parents=True)
    save_file(dict(tensors or exported(backend)), folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in backend.serving_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEngine]:
    backend = backend_of(1)
    folder = write_model(tmp_path_factory.mktemp("model") / "first", backend)
    backend.close()
    one = EmbeddedEngine(EngineSpec(type="embedded", max_running=64, kv_tokens=8192, max_context=64))
    await one.start(folder)
    yield one
    await one.close()


class EngineRollouts(FakeRollouts):
    """One real engine in place of a fleet; everything else is in memory."""

    def __init__(self, engine: EmbeddedEngine, folder: Path, backend: TorchBackend) -> None:
        super().__init__(lambda group, index, so_far: self._drawn[group.id, index][0], seed=SEED)
        self._engine, self._folder, self._backend = engine, folder, backend
        self._drawn: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        self._rids = iter(range(10**6))

    def publish_version(self, version: int, tensors: Any) -> WeightsRef:
        """The folder's, not the network's."""
        write_model(self._folder / str(version), self._backend, tensors)
        return WeightsRef(version)

    async def publish(self, weights: WeightsRef) -> None:
        await self._engine.load_weights(weights.version, self._folder / str(weights.version))
        await super().publish(weights)

    async def begin(self, groups: Any) -> None:
        await asyncio.gather(*(self._draw(group, index) for group in groups for index in range(group.n)))
        await super().begin(groups)

    async def _draw(self, group: Group, index: int) -> None:
        request = GenerateRequest(
            f"{self._folder.name}-{next(self._rids):06d}",
            unpack_ids(group.prompt_ids).tolist(),
            max_new_tokens=group.sampling.max_new_tokens,
            sampling=group.sampling,
            seed=sample_seed(SEED, f"{group.id}.{index}"),
        )
        ids, log_probs = list[int](), list[float]()
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                ids += chunk.ids
                log_probs += chunk.logprobs
        self._drawn[group.id, index] = ids, log_probs

    def _response(self, entry: Any, index: int) -> Response:
        _, log_probs = self._drawn[entry.group.id, index]
        drawn = np.asarray(log_probs, dtype="<f4").tobytes()
        return msgspec.structs.replace(super()._response(entry, index), logprobs=drawn)


def sevens(sample: Sample) -> dict[str, float]:
    """The share of sevens."""
    share = sample.response.count("7") / max(1, sample.response_length)
    return {"reward": share, "any": float(share > 0)}


async def train(
    engine: EmbeddedEngine, folder: Path, own: OwnAlgorithm, algorithm: dict[str, Any]
) -> list[dict[str, float]]:
    spec = RecipeSpec(
        model={"config": SOURCE}, reward={"function": "r:score"}, seed=SEED, evaluation={"every_steps": 0},
        algorithm={"steps": STEPS, "prompts_per_step": 8, "min_micro_batch_samples": 8, **algorithm},
        sampling={"samples_per_prompt": 8, "max_new_tokens": 4},
    )  # fmt: skip
    model = replace(MODEL, head="both") if spec.algorithm.shares_trunk else MODEL
    backend = backend_of(STEPS * updates_per_step(spec.algorithm), model)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.start()
    rollouts = EngineRollouts(engine, folder / "weights", backend)
    logging = LoggingSpec(tensorboard=False, samples=SampleLogSpec(per_step=0))
    session = Session(
        TrainerState(seed=SEED, stage=TrainingStage.RL), checkpoints, MetricsLogger(folder), 100, rollouts,
        SampleLog(folder, logging.samples, seed=SEED),
    )  # fmt: skip
    runner = UserCodeRunner(
        rollouts, TOKENIZER, reward=RewardFunction(InlineCalls(sevens), timeout_s=60.0, failures=Failures({}, {}))
    )
    supply = GroupSupply(rollouts, runner, session=session)
    rows = [DataRow(f"f:{number}", {"prompt": f"{number}="}) for number in range(10)]
    parts = RlParts(
        rollouts=rollouts,
        runner=runner,
        supply=supply,
        versions=PolicyVersions(MemoryPublisher(rollouts.publish_version), rollouts, session=session),  # type: ignore[arg-type]
        backend=backend,
        prompts=DataBuffer([prepare_prompts(rows, TOKENIZER, 40)], [1.0], seed=SEED),
        tokenizer=TOKENIZER,
        own=own,
        critic=critic_of(spec, backend),
    )
    try:
        assert await run_beside(run_rl_training(parts, spec, session), runner.run(), supply.run(), parts.versions.run())
    finally:
        session.end(folder, "done")
        backend.close()
        if parts.critic is not None:
            parts.critic.backend.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def named_on_the_page() -> re.Pattern[str]:
    """NAME and K stand for any."""
    names = re.findall(r"`([a-z_]+/[\w/]+)`", PAGE.read_text())
    return re.compile("|".join(re.sub("NAME|K$", "[a-z0-9_]+", name) for name in names))


def reinforce(tokens: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = (tokens.log_probs - tokens.old_log_probs).exp()
    return -ratio * tokens.advantages, {"weight": ratio}


OWN = OwnAlgorithm(
    own_loss("own:reinforce", reinforce),
    own_advantage("own:centred", lambda samples: [one.reward - 0.1 for one in samples]),
)
# PPO, with its critic, has tests of its own.
WHOLE_STEP = {"old_log_probs": "recompute"}
CASES: dict[str, tuple[dict[str, Any], OwnAlgorithm]] = {
    **{name.value: ({"name": name}, NOTHING_OWN) for name in AlgorithmName if name.value != "ppo"},
    "reinforce++": ({"name": "reinforce++", **WHOLE_STEP}, NOTHING_OWN),
    "ppo": ({"name": "ppo", "mini_batch_prompts": 4, **WHOLE_STEP}, NOTHING_OWN),
    "ppo on one trunk": (
        {"name": "ppo", "mini_batch_prompts": 4, "critic": {"trunk": "shared"}, **WHOLE_STEP},
        NOTHING_OWN,
    ),
    "entropy bonus": ({"entropy_coefficient": 0.001}, NOTHING_OWN),
    "epochs": ({"update_epochs": 2, "mini_batch_prompts": 4, **WHOLE_STEP}, NOTHING_OWN),
    "own": ({"update_epochs": 2}, OWN),
}


@pytest.mark.parametrize("case", list(CASES))
async def test_an_algorithm_raises_the_reward(engine: EmbeddedEngine, tmp_path: Path, case: str) -> None:
    algorithm, own = CASES[case]
    lines = await train(engine, tmp_path, own, algorithm)
    rewards = [line["reward/mean"] for line in lines]
    assert len(rewards) == STEPS
    assert rewards[-1] > rewards[0] + 0.1, rewards
    for line in lines:
        numbers = {name: value for name, value in line.items() if "/" in name}
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert [name for name in numbers if not named_on_the_page().fullmatch(name)] == []
        assert line["rollout_corr/k3_kl"] < 1e-6, "engine and learner are the same model"
    assert ("loss/weight" in lines[0]) == (case == "own")
