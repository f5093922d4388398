"""GRPO, DPO and the reward model have TRL's losses and gradients, on one batch; TRL runs in an environment of its own.

What is matched: the same models, tokens, old and reference logprobs, advantages and margins. GRPO by TRL's
`_compute_loss` with importance sampling per token, no correction for vLLM (there is none), one window per generation
batch, epsilon as given, delta off; ours with `oldLogProbs: bypass`, no correction, `dualClip` beyond every ratio. DPO
and reward model by TRL's `compute_loss`, with its own collators and its own reference model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.parts.preferences import DpoSpec, RewardModelSpec
from polyrl_trainer.backend import Loss
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.losses import normalizer, policy_loss
from polyrl_trainer.losses.preferences import dpo_loss, reward_model_loss
from polyrl_trainer.sample import Sample

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "learner"))

from peer_process import LIMIT, SPECIAL, WAIT_S, Bench, PeerProcess, Shape, draw_batch, peers, sample, samples_of

pytestmark = pytest.mark.trl

TOLERANCE = 1e-5
"""Relative, and absolute below 1: float32 sums in another order."""
FIELDS: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1,
}  # fmt: skip
NO_DUAL_CLIP = 1e6


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    batch = draw_batch(Shape(16, 8, median=24), FIELDS["vocab_size"])
    made = Bench(tmp_path_factory.mktemp("bench"), FIELDS, batch, EngineConfig(device="cpu"))
    made.prepare()
    return made


@pytest.fixture(scope="module")
def trl(bench: Bench) -> Iterator[PeerProcess]:
    with peers(os.environ["POLYRL_TRL_PYTHON"], bench.folder, threads=1) as process:
        print(process.versions)
        yield process


def ours(
    bench: Bench, model: str, samples: list[Sample], loss: Loss, divisor: float, together: int = 1
) -> tuple[float, float]:
    """The loss, and the norm of its gradient."""
    with closing(bench.backend(bench.config(model))) as backend:
        sums = backend.forward_backward(samples, loss, together=together).result(WAIT_S)
        return sums["loss"] / divisor, backend.optim_step(divisor).result(WAIT_S).grad_norm


def assert_equal(found: tuple[float, float], theirs: dict[str, float]) -> None:
    wanted = (theirs["loss"], theirs["norm"])
    assert wanted[1] > 1e-3, "a gradient is to be compared"
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.2}
GRPO = [
    # (TRL's settings, ours)
    ({"loss_type": "grpo", "beta": 0.0, **CLIP}, {"name": "grpo"}),
    ({"loss_type": "dr_grpo", "beta": 0.0, **CLIP}, {"name": "dr-grpo"}),
    ({"loss_type": "dapo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28}, {"name": "dapo"}),
    ({"loss_type": "cispo", "beta": 0.0, "epsilon_high": 5.0}, {"name": "cispo"}),
    ({"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True, **CLIP}, {"kl_coefficient": 0.1}),
    (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False, **CLIP},
        {"kl_coefficient": 0.1, "kl_estimator": "k3"},
    ),
    ({"loss_type": "grpo", "beta": 0.0, "delta": 1.4, **CLIP}, {"name": "grpo", "dual_clip": 1.4}),
    (
        {"loss_type": "grpo", "beta": 0.0, "delta": None, "importance_sampling_level": "sequence", **CLIP},
        {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    ),
]


@pytest.mark.parametrize(("theirs", "given"), GRPO, ids=lambda one: " ".join(map(str, one.values())))
def test_grpo(bench: Bench, trl: PeerProcess, theirs: dict[str, Any], given: dict[str, Any]) -> None:
    algorithm = AlgorithmSpec.model_validate({"dual_clip": NO_DUAL_CLIP, "steps": 1, **given})
    samples = samples_of(bench.batch)
    divisor = normalizer(algorithm, len(samples), sum(float(one.loss_mask.sum()) for one in samples), LIMIT)
    found = ours(bench, "model", samples, policy_loss(algorithm), divisor)
    assert_equal(found, trl.ask(do="loss", kind="grpo", settings=theirs))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo(bench: Bench, trl: PeerProcess, loss: str, beta: float) -> None:
    pairs = bench.batch["pairs"]
    answers = [sample(pair["prompt"], pair[name]) for pair in pairs for name in ("chosen", "rejected")]
    with closing(bench.backend(bench.config("reference"))) as reference:
        scores = reference.log_probs(answers).result(WAIT_S)
    answers = [replace(one, reference_log_probs=score) for one, score in zip(answers, scores, strict=True)]
    of_pairs = partial(dpo_loss, dpo=DpoSpec.model_validate({"loss": loss, "beta": beta}))
    theirs = trl.ask(do="loss", kind="dpo", settings={"loss_types": [loss], "beta": beta})
    assert_equal(ours(bench, "model", answers, of_pairs, len(pairs), together=2), theirs)


@pytest.mark.parametrize("centre", [0.0, 0.01])
def test_the_reward_model(bench: Bench, trl: PeerProcess, centre: float) -> None:
    pairs = bench.batch["pairs"]
    answers = [scored(pair, name) for pair in pairs for name in ("chosen", "rejected")]
    loss = partial(reward_model_loss, model=RewardModelSpec(center_rewards_coefficient=centre))
    theirs = trl.ask(do="loss", kind="reward", settings={"center_rewards_coefficient": centre or None})
    assert_equal(ours(bench, "scorer", answers, loss, len(pairs), together=2), theirs)


def scored(pair: dict[str, Any], name: str) -> Sample:
    """As `data.preferences` makes it: one token more, which is the learned one."""
    assert SPECIAL.pad is not None
    margin = pair["margin"] if name == "chosen" else 0.0
    return sample(pair["prompt"] + pair[name], [SPECIAL.pad], advantage=margin)
