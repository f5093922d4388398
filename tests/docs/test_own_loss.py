"""The page on own losses: its example is what a job can name, and does what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl_trainer.user_code.own_algorithm import load_own, try_own

PAGE = Path(__file__).parents[2] / "docs/how-to/own-loss.md"
EXAMPLE = re.compile(r"```(python|yaml)\n(.*?)```", re.DOTALL)


def test_the_example_passes_the_check_that_a_run_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = dict(EXAMPLE.findall(PAGE.read_text()))
    (tmp_path / "own.py").write_text(blocks["python"])
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = AlgorithmSpec.model_validate(yaml.safe_load(blocks["yaml"])["spec"]["recipe"]["algorithm"])
    own = load_own(spec, tmp_path)
    try_own(own, spec)
    module = sys.modules.pop("own")
    # At ratio 1 the gate's slope is that of the plain policy gradient, whatever tau: d(loss) = -A.
    tokens = type("Tokens", (), {"log_probs": torch.zeros(2, requires_grad=True), "old_log_probs": torch.zeros(2)})
    tokens.advantages = torch.tensor([2.0, -1.0])  # type: ignore[attr-defined]
    loss, numbers = module.sapo(tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.log_probs)  # type: ignore[attr-defined]
    assert gradient.tolist() == pytest.approx([-2.0, 1.0])
    assert set(numbers) == {"gate"}
    assert all(len(block.strip().splitlines()) <= 10 for block in re.split(r"(?=^def )", blocks["python"], flags=re.M))
