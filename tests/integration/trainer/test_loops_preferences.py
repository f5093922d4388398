"""DPO and the reward model on the real backend: they learn what was preferred, and an interrupted run ends
bit-identical to a whole one."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from polyrl.manifest.data import DatasetSpec
from polyrl.manifest.parts.preferences import DpoSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig, SpecialTokens
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.backends.policy import ReferencePolicy
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.checkpoints import Checkpoints, latest, read_checkpoint
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.preferences import AnswerPair, prepare_pairs, prepare_scored_pairs
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.loops.preference_loop import PreferenceStage, run_preference_training
from polyrl_trainer.losses.preferences import dpo_loss
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainerState

TOKENIZER = CharacterTokenizer("0123456789=")
FIELDS = {
    "model_type": "qwen2", "vocab_size": 14, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
STEPS = 6
SPEC = DatasetSpec(path="a.jsonl")
MODEL = ModelConfig(FIELDS, seed=5, dtype="float32", special_tokens=SpecialTokens(pad=0, bos=1, eos=2))
CPU = EngineConfig(device="cpu")
WAIT_S = 60.0


def rows(count: int) -> list[DataRow]:
    """The copy was preferred, the digits backwards and one more were not."""
    dice = random.Random(3)
    digits = ["".join(dice.sample("012345678", k=dice.randint(2, 4))) for _ in range(count)]
    fields = [{"prompt": f"{text}=", "chosen": text, "rejected": f"{text[::-1]}9"} for text in digits]
    return [DataRow(f"f:{line}", one) for line, one in enumerate(fields)]


def recipe(mode: str, **more: Any) -> RecipeSpec:
    section = {"steps": STEPS, "batchSize": 8, "optimizer": {"learningRate": 0.005}, **more}
    return RecipeSpec.model_validate(
        {"mode": mode, "model": {"config": FIELDS}, "dpo" if mode == "dpo" else "rewardModel": section}
    )


class Run:
    """What one run left behind."""

    def __init__(self, folder: Path, done: bool) -> None:
        self.folder, self.done = folder, done
        self.rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def model(self) -> Path:
        return latest(self.folder) / "model"


async def run(folder: Path, of: RecipeSpec, resume: Path | None = None, stop_after: int | None = None) -> Run:
    stage = PreferenceStage.of(of)
    learns_rewards = of.mode == "reward-model"
    prepare = prepare_scored_pairs if learns_rewards else prepare_pairs
    pairs = DataBuffer([prepare(rows(40), SPEC, TOKENIZER, 60)], [1.0], seed=5)
    model = replace(MODEL, head="value" if learns_rewards else "tokens")
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.start()
    optimizer = OptimizerConfig.from_manifest(stage.optimizer, STEPS)
    with ExitStack() as stack:
        backend = stack.enter_context(closing(create_torch_backend(model, CPU, optimizer, CheckpointConfig(False))))
        reference = None if learns_rewards else stack.enter_context(closing(ReferencePolicy(model, CPU)))
        state = TrainerState(seed=5, stage=stage.stage)
        if resume is not None:
            state = read_checkpoint(resume)
            backend.load(resume / "model")
        metrics = MetricsLogger(folder)
        session = Session(state, checkpoints, metrics, checkpoint_every_steps=2)
        if stop_after is not None:
            report = session.report

            async def report_and_stop(step: int, values: Any, *others: Any) -> None:
                await report(step, values, *others)
                if step == stop_after:
                    session.stop.set()

            session.report = report_and_stop  # type: ignore[method-assign]
        done = await run_preference_training(backend, pairs, stage, session=session, reference=reference)
        metrics.close()
    return Run(folder, done)


@pytest.mark.parametrize("mode", ["dpo", "reward-model"])
@pytest.mark.parametrize("stop_after", [1, 4])
async def test_an_interrupted_run_ends_bit_identical(tmp_path: Path, mode: str, stop_after: int) -> None:
    whole = await run(tmp_path / "whole", recipe(mode))
    cut = await run(tmp_path / "cut", recipe(mode), stop_after=stop_after)
    assert (whole.done, cut.done) == (True, False)
    resumed = await run(tmp_path / "cut", recipe(mode), resume=latest(tmp_path / "cut"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (whole.model / name).read_bytes() == (resumed.model / name).read_bytes(), name
    timeless = [
        [{k: v for k, v in row.items() if not k.startswith(("tim", "perf/"))} for row in one.rows]
        for one in (whole, resumed)
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
async def test_dpo_comes_to_prefer_what_was_chosen(tmp_path: Path, loss: str) -> None:
    learned = await run(tmp_path, recipe("dpo", loss=loss))
    first, last = learned.rows[0], learned.rows[-1]
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6), "the reference is the model it starts from"
    assert last["rewards/margins"] > 0.02
    assert last["rewards/accuracies"] > 0.8
    assert last["dpo/loss"] < first["dpo/loss"]
    assert first["dpo/loss"] == pytest.approx({"sigmoid": np.log(2), "ipo": 25.0, "hinge": 1.0}[loss]), "of a pair"
    assert not {"loss", "tokens", "flops", "learn_seconds"} & set(first), "sums of the learner are no means over pairs"
    assert last["rewards/chosen"] - last["rewards/rejected"] == pytest.approx(last["rewards/margins"], abs=1e-6)
    assert last["logps/chosen"] < 0
    start, end = (load_model(place, 5, "float32", MODEL.special_tokens) for place in (FIELDS, learned.model))
    pairs = prepare_pairs(rows(8), SPEC, TOKENIZER, 60)
    gained = [[log_ratio(end, start, answer).item() for answer in pair] for pair in pairs]
    assert sum(chosen > rejected for chosen, rejected in gained) >= 7, "whatever the metrics say"


async def test_a_reward_model_comes_to_score_and_transformers_gives_the_same_scores(tmp_path: Path) -> None:
    learned = await run(tmp_path, recipe("reward-model", centerRewardsCoefficient=0.01))
    assert learned.rows[-1]["accuracy"] > 0.8
    assert learned.rows[-1]["margin"] > learned.rows[0]["margin"] + 0.1
    assert abs(learned.rows[-1]["mean_reward"]) < 5
    pairs = prepare_scored_pairs(rows(8), SPEC, TOKENIZER, 60)
    answers = [answer for pair in pairs for answer in pair]
    scores = ours(
        ModelConfig(learned.model, dtype="float32", head="value", special_tokens=MODEL.special_tokens), answers
    )
    np.testing.assert_allclose(theirs(learned.model, answers), scores, atol=2e-5)
    assert sum(chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)) >= 7


def ours(model: ModelConfig, answers: list[Any]) -> list[float]:
    optimizer = OptimizerConfig(learning_rate=1e-3, total_steps=1)
    with closing(create_torch_backend(model, CPU, optimizer, CheckpointConfig(False))) as backend:
        return [float(values[-1]) for values in backend.values(answers).result(WAIT_S)]


def theirs(folder: Path, answers: list[Any]) -> list[float]:
    """One batch, padded on the right."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    width = max(answer.length for answer in answers) - 1
    ids = [np.pad(answer.tokens[:-1], (0, width + 1 - answer.length)) for answer in answers]
    batch = torch.from_numpy(np.stack(ids))
    with torch.no_grad():
        scores: list[float] = model(input_ids=batch, attention_mask=(batch != 0).long()).logits[:, 0].tolist()
    return scores


def log_ratio(policy: Any, reference: Any, answer: Any) -> torch.Tensor:
    """Of one answer by itself, from whole logits."""
    ids, mask = torch.from_numpy(answer.tokens).unsqueeze(0), torch.from_numpy(answer.loss_mask)[1:]
    logs = [
        torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1)
        for model in (policy, reference)
    ]
    return ((logs[0] - logs[1].detach()) * mask).sum()


@pytest.mark.parametrize("budget", [16384, 24], ids=["one pass", "a pass for each pair"])
def test_a_batch_of_pairs_has_the_loss_and_gradient_of_a_plain_learner(budget: int) -> None:
    made: list[AnswerPair] = prepare_pairs(rows(9), SPEC, TOKENIZER, 60)
    policy, reference = (load_model(FIELDS, seed, "float32", MODEL.special_tokens) for seed in (5, 6))
    ratios = [[log_ratio(policy, reference, answer) for answer in pair] for pair in made]
    loss = torch.stack([-torch.nn.functional.logsigmoid(0.1 * (one - other)) for one, other in ratios]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([one.grad.square().sum() for one in policy.parameters() if one.grad is not None]).sum().sqrt()
    engine = replace(CPU, max_tokens_per_micro_batch=budget)
    optimizer = OptimizerConfig(learning_rate=1e-3, total_steps=1)
    with (
        closing(create_torch_backend(MODEL, engine, optimizer, CheckpointConfig(False))) as backend,
        closing(ReferencePolicy(replace(MODEL, seed=6), engine)) as frozen,
    ):
        answers = [answer for pair in made for answer in pair]
        scores = frozen.log_probs(answers).result(WAIT_S)
        answers = [replace(one, reference_log_probs=score) for one, score in zip(answers, scores, strict=True)]
        assert _loss(backend, answers) == pytest.approx(loss.item(), rel=1e-5)
        assert backend.optim_step(1.0).result(WAIT_S).grad_norm == pytest.approx(float(norm), rel=1e-4)


def _loss(backend: TorchBackend, answers: list[Any]) -> float:
    sums = backend.forward_backward(answers, lambda inputs: dpo_loss(inputs, DpoSpec()), together=2).result(WAIT_S)
    return sums["loss"]
