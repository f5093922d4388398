"""Engines that send what no policy drew are named and pause; honest ones of other arithmetic are not. The manager, its
client, the learner and the loop are the real ones; engines draw from the learner's own weights, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq.asyncio

from polyrl.keys import ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import Pool
from polyrl.weights import WeightsRef
from polyrl.wire import FINISH_CODES, Assign, Deltas, Hello, pack_ids, pack_rows, unpack_ids
from polyrl.wire.engine_identity import engine_keys
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.manager.server import Listen, Manager
from polyrl_rollout.testing.fake_agent import FakeAgent
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.policy import create_policy
from polyrl_trainer.backends.single_process import create_torch_backend
from polyrl_trainer.checkpoints import Checkpoints
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.examples import prepare_prompts
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import EOS_ID, CharacterTokenizer
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.generation.supply import GroupSupply
from polyrl_trainer.loops.rl_loop import RlParts, run_rl_training
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.session import Session, run_beside
from polyrl_trainer.state import TrainerState, TrainingStage
from polyrl_trainer.testing.backend_conformance import MODEL as TINY
from polyrl_trainer.testing.inline_calls import InlineCalls
from polyrl_trainer.testing.memory_publisher import MemoryPublisher
from polyrl_trainer.user_code.rewards import Failures, RewardFunction
from polyrl_trainer.weights.policy_versions import PolicyVersions

EPOCH = 1
STEPS = 2
TOKENIZER = CharacterTokenizer("0123456789=")
SPEC = RecipeSpec.model_validate(
    {
        "model": {"config": {"model_type": "qwen2"}},
        "algorithm": {"steps": STEPS, "prompts_per_step": 12, "optimizer": {"learning_rate": 1e-3}},
        "sampling": {"samples_per_prompt": 4, "max_new_tokens": 16},
        "reward": {"function": "r:score"},
        "evaluation": {"every_steps": 0},
    }
)
MODEL = ModelConfig(
    {**dict(TINY.source), "num_hidden_layers": 1, "initializer_range": 0.5},
    seed=3,
    dtype="float32",
    vocabulary=TOKENIZER.vocabulary,
)
BF16_NOISE = 0.03
"""Standard deviation of an honest engine's logprobs, in nats, where its kernels are others than the learner's."""

Draw = Callable[[np.ndarray, np.random.Generator], tuple[int, float]]
"""Logprobs of all tokens to the one that is sent, and the logprob that is reported of it."""


def honest(logprobs: np.ndarray, dice: np.random.Generator) -> tuple[int, float]:
    drawn = int(dice.choice(len(logprobs), p=np.exp(logprobs) / np.exp(logprobs).sum()))
    return drawn, min(0.0, float(logprobs[drawn] + dice.normal(0.0, BF16_NOISE)))


def invented(logprobs: np.ndarray, dice: np.random.Generator) -> tuple[int, float]:
    """Any token, and a logprob that looks well."""
    return int(dice.integers(EOS_ID + 1, len(logprobs))), -0.3


def chosen(logprobs: np.ndarray, dice: np.random.Generator) -> tuple[int, float]:
    """One of the less likely half, with its true logprob."""
    drawn = int(dice.choice(np.argsort(logprobs)[: len(logprobs) // 2]))
    return drawn, float(logprobs[drawn])


class Policy:
    """What engines generate with: the newest weights."""

    def __init__(self) -> None:
        self._model = create_policy(MODEL, EngineConfig("cpu")).model

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightsRef:
        self._model.load_state_dict(dict(tensors), strict=False)
        return WeightsRef(version, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b"%d" % version)

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> np.ndarray:
        logits = self._model(input_ids=torch.tensor([ids])).logits[0, -1]
        return torch.log_softmax(logits.float(), dim=0).numpy().astype(np.float64)


class DrawingAgent(FakeAgent):
    """Draws each response by `draw`, and sends it in one frame."""

    def __init__(self, policy: Policy, draw: Draw, *args: Any) -> None:
        super().__init__(*args)
        self._policy, self._draw, self._answered = policy, draw, 0
        self._dice = np.random.default_rng(7)

    def _begin(self, assign: Assign) -> None:
        self.assigned.append(assign)

    async def _step(self) -> None:
        await super()._step()
        for assign in self.assigned[self._answered :]:
            self._answered += 1
            await self._answer(assign)
            await asyncio.sleep(0)  # the others' turn

    async def _answer(self, assign: Assign) -> None:
        prompt, drawn, reported = unpack_ids(assign.input_ids).tolist(), list[int](), list[float]()
        while len(drawn) < assign.max_new_tokens and drawn[-1:] != [EOS_ID]:
            token, logprob = self._draw(self._policy.logprobs([*prompt, *drawn]), self._dice)
            drawn.append(token)
            reported.append(logprob)
        finish = FINISH_CODES.index("stop" if drawn[-1] == EOS_ID else "length")
        self._seq += 1
        rows, logprobs = pack_rows([(assign.assignment, assign.offset, len(drawn), finish)]), np.array(reported, "<f4")
        await self.send(Deltas(self._seq, self._version, rows=rows, ids=pack_ids(drawn), logprobs=logprobs.tobytes()))


def make_session(folder: Path, client: RolloutClient) -> Session:
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.start()
    state = TrainerState(seed=7, stage=TrainingStage.RL)
    return Session(state, checkpoints, MetricsLogger(folder), STEPS, client)


async def train(folder: Path, client: RolloutClient, policy: Policy) -> None:
    session = make_session(folder, client)
    rows = [DataRow(f"f:{number}", {"prompt": f"{number}=", "number": number}) for number in range(40)]
    state = session.state
    failures = Failures(state.results.user_code_failures, state.results.first_failures)
    reward = RewardFunction(
        InlineCalls(lambda sample: float(len(sample.response) % 3)), timeout_s=60.0, failures=failures
    )
    runner = UserCodeRunner(client, TOKENIZER, reward=reward, episodes=None, group_filter=None)
    supply = GroupSupply(client, runner, session=session)
    optimizer = OptimizerConfig.from_manifest(SPEC.algorithm.optimizer, STEPS)
    with closing(create_torch_backend(MODEL, EngineConfig("cpu"), optimizer, CheckpointConfig(fsync=False))) as backend:
        parts = RlParts(
            backend=backend,
            prompts=DataBuffer([prepare_prompts(rows, TOKENIZER, 100)], [1.0], seed=7),
            tokenizer=TOKENIZER,
            rollouts=client,
            runner=runner,
            supply=supply,
            versions=PolicyVersions(MemoryPublisher(policy.publish), client, session=session),
        )
        assert await run_beside(run_rl_training(parts, SPEC, session), runner.run(), supply.run(), parts.versions.run())
    session.end(folder, "done")


FLEET: dict[str, Draw] = {"one": honest, "two": honest, "three": honest, "inventor": invented, "chooser": chosen}


async def test_poisoning_engines_are_named_and_pause_and_honest_ones_are_not(tmp_path: Path) -> None:
    write_run_keys(tmp_path)
    context, policy = zmq.asyncio.Context(), Policy()
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH, lease_s=30.0, lost_s=30.0))
    own = read_keys(ManagerKeys, tmp_path / "manager.key")
    async with asyncio.timeout(60), Manager(ledger, own, EPOCH, Listen()) as manager:
        tasks = [asyncio.create_task(manager.run())]
        for name, draw in FLEET.items():
            hello = Hello(
                EPOCH, name, pool=Pool.SPOT, max_running=4, kv_tokens=10_000, max_context=100, weight_version=-1
            )
            keys = engine_keys(tmp_path, name)
            agent = DrawingAgent(policy, draw, context, manager.endpoints.agents, keys, hello)
            tasks.append(asyncio.create_task(agent.run()))
        async with RolloutClient.connect(manager.endpoints.trainer, tmp_path / "trainer.key", EPOCH) as client:
            await train(tmp_path / "run", client, policy)
        status = manager.status()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)
    named = {one.name: one.departed for one in status.engines if one.departed}
    print(named)
    assert named.keys() == {"inventor", "chooser"}
    assert "drift" in named["inventor"]
    assert "surprise" in named["chooser"]
    paused = {one.name for one in status.engines if ledger.state.engines[one.name].quarantined_until > manager.now()}
    assert paused == named.keys()
