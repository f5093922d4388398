"""SFT and offline RL on the real backend: the loss falls, and an interrupted run ends bit-identical to a whole one."""

from __future__ import annotations

import json
import random

import pytest

from polyrl.manifest.parts.algorithm import AlgorithmName
from polyrl.manifest.parts.optimizer import OptimizerSpec
from polyrl.manifest.recipe import RecipeSpec, SftSpec
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.checkpoints import Checkpoints, latest, read_checkpoint
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.examples import prepare_conversations, prepare_finished_groups
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.loops.offline_loop import run_offline_training
from polyrl_trainer.loops.sft_loop import run_sft_training
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainerState, TrainingStage

TOKENIZER = CharacterTokenizer("0123456789=")
MODEL = {
    "model_type": "qwen2", "vocab_size": 14, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
STEPS = 8
SFT = SftSpec(steps=STEPS, batch_size=8, optimizer=OptimizerSpec(learning_rate=1e-2, schedule="cosine"))


def copying_rows(count, **more):
    dice = random.Random(3)
    digits = ["".join(dice.choices("0123456789", k=dice.randint(1, 4))) for _ in range(count)]
    return [DataRow(f"f:{line}", {"prompt": f"{text}=", "response": text, **more}) for line, text in enumerate(digits)]


class Learner:
    """A stage's backend and session in a folder."""

    def __init__(self, folder, stage, resume=None):
        folder.mkdir(exist_ok=True)
        self.checkpoints = Checkpoints(folder, keep=2)
        self.checkpoints.start()
        optimizer = OptimizerConfig.from_manifest(SFT.optimizer, STEPS)
        model = ModelConfig(MODEL, seed=5, dtype="float32")
        self.backend = create_torch_backend(model, EngineConfig(device="cpu"), optimizer, CheckpointConfig(fsync=False))
        state = TrainerState(seed=5, stage=stage)
        if resume is not None:
            state = read_checkpoint(resume)
            self.backend.load(resume / "model")
        self.metrics = folder / "metrics.jsonl"
        self.steps: list[int] = []
        self.session = Session(state, self.checkpoints, MetricsLogger(folder), checkpoint_every_steps=3)

    async def after_step(self):
        self.steps.append(self.session.state.step)

    def close(self):
        self.backend.close()
        self.session.metrics.close()

    def lines(self):
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]


async def sft(folder, resume=None, stop_after=None, stop_after_step=None, spec=SFT):
    learner = Learner(folder, TrainingStage.SFT, resume)
    data = DataBuffer([prepare_conversations(copying_rows(50), TOKENIZER, 60)], [1.0], seed=5)
    if stop_after is not None:
        report = learner.session.report

        async def report_and_stop(step, values, phase=None):
            await report(step, values, phase)
            if step == stop_after:
                learner.session.stop.set()

        learner.session.report = report_and_stop

    async def after_step():
        await learner.after_step()
        if learner.session.state.step == stop_after_step:
            learner.session.ask_to_stop()

    done = await run_sft_training(learner.backend, data, spec, session=learner.session, after_step=after_step)
    learner.close()
    assert done == (stop_after is None and stop_after_step is None)
    return learner


@pytest.mark.parametrize("stop_after", [1, 3, 5])
async def test_interrupted_sft_ends_bit_identical(tmp_path, stop_after):
    whole = await sft(tmp_path / "whole")
    cut = await sft(tmp_path / "cut", stop_after=stop_after)
    assert cut.session.state.step == stop_after
    resumed = await sft(tmp_path / "cut", resume=latest(tmp_path / "cut"))
    final = f"sft-step-{STEPS:06d}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        paths = [learner.checkpoints.folder / final / "model" / name for learner in (whole, resumed)]
        assert paths[0].read_bytes() == paths[1].read_bytes(), name
    losses = [[line["sft/loss"] for line in learner.lines()] for learner in (whole, resumed)]
    assert losses[0] == losses[1]
    assert resumed.session.state.cursors == whole.session.state.cursors


async def test_a_run_that_is_asked_to_stop_after_a_step_has_it_saved(tmp_path):
    """As in the middle of an evaluation, which comes after a step's own save."""
    learner = await sft(tmp_path, stop_after_step=4)
    assert learner.session.state.step == 4
    assert learner.checkpoints.newest().name == "sft-step-000004"


async def test_sft_that_is_to_end_where_it_stands_ends_there(tmp_path):
    """RL, which comes next, did not find its last checkpoint."""
    await sft(tmp_path, stop_after=5)
    shorter = SFT.model_copy(update={"steps": 5})
    learner = await sft(tmp_path, resume=latest(tmp_path), spec=shorter)
    assert learner.checkpoints.stage_final(TrainingStage.SFT) == latest(tmp_path)
    assert (learner.session.state.step, len(learner.lines())) == (5, 5)
    saved = latest(tmp_path) / "state.json"
    before = saved.stat().st_ino
    await sft(tmp_path, resume=latest(tmp_path), spec=shorter)
    assert saved.stat().st_ino == before, "nothing is saved of a stage that is over"


async def test_a_step_of_sft_is_divided_by_its_learned_tokens(tmp_path, monkeypatch):
    divisors, step = [], TorchBackend.optim_step

    def noted(self, normalizer):
        divisors.append(normalizer)
        return step(self, normalizer)

    monkeypatch.setattr(TorchBackend, "optim_step", noted)
    learner = await sft(tmp_path)
    assert len(divisors) == STEPS
    assert sum(divisors) == learner.session.state.results.tokens_trained


async def test_sft_learns_and_says_so(tmp_path):
    learner = await sft(tmp_path)
    lines = learner.lines()
    assert learner.steps == list(range(1, STEPS + 1)), "each step may be followed by an evaluation"
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["sft/loss"] < lines[0]["sft/loss"] - 0.3
    assert all(0 <= line["perf/padding_fraction"] < 0.1 for line in lines)


@pytest.mark.parametrize(
    ("name", "kl_coefficient", "kl_place"),
    [
        (AlgorithmName.GRPO, 0.1, "loss"),
        (AlgorithmName.GRPO, 0.1, "reward"),
        *((name, 0.0, "loss") for name in AlgorithmName if name is not AlgorithmName.PPO),
    ],
)
async def test_offline_rl_raises_the_probability_of_what_was_rewarded(tmp_path, name, kl_coefficient, kl_place):
    rows = [
        DataRow(f"f:{line}", {"prompt": "1=", "response": digit, "reward": float(digit == "7"), "group": line // 4})
        for line, digit in enumerate("1234456778977723")
    ]
    groups = DataBuffer([prepare_finished_groups(rows, TOKENIZER, 60)], [1.0], seed=5)
    learner = Learner(tmp_path, TrainingStage.OFFLINE_RL)
    rewarded = [sample for draw in groups.get(4) for sample in draw.item if sample.reward]
    groups = DataBuffer([prepare_finished_groups(rows, TOKENIZER, 60)], [1.0], seed=5)
    before = learner.backend.log_probs(rewarded).result()
    epochs = 2 if name is AlgorithmName.DAPO else 1
    algorithm = {
        "name": name, "steps": STEPS, "prompts_per_step": 4, "mini_batch_prompts": 2, "kl_coefficient": kl_coefficient,
        "kl_place": kl_place, "old_log_probs": "recompute" if name is AlgorithmName.REINFORCE_PLUS_PLUS else "bypass",
        "update_epochs": epochs,
    }  # fmt: skip
    recipe = RecipeSpec(
        mode="offline-rl", model={"config": MODEL}, algorithm=algorithm, data={"rl": [{"path": "f.jsonl"}]}
    )
    reference = learner.backend if kl_coefficient else None
    assert await run_offline_training(learner.backend, groups, recipe, learner.session, reference)
    after = learner.backend.log_probs(rewarded).result()
    learner.close()
    assert sum(float(row.sum()) for row in after) > sum(float(row.sum()) for row in before) + 1
    assert learner.session.state.results.optimizer_steps == 2 * STEPS * epochs
    assert {"reward/mean", "actor/pg_loss"} <= set(learner.lines()[0])
    in_reward = kl_coefficient and kl_place == "reward"
    assert ("actor/reward_kl_penalty" in learner.lines()[0]) == bool(in_reward)
    assert {line["rollout/zero_std"] for line in learner.lines()} == {0.25}, (
        "one group of four, whatever its mini-batch"
    )
