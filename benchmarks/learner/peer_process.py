"""The batch that PolyRL and its peers have in common, and the process that the peers run in (`peers.py`).

Everything is drawn from a seed: models of random weights, sequences of random tokens, lengths as of real answers (most
are short, some are five times as long), advantages, and old logprobs that differ from the policy's, so that ratios are
clipped on both sides.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig, SpecialTokens
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.sample import Sample

SPECIAL: Final = SpecialTokens(pad=0, bos=1, eos=2)
ALPHABET: Final = "0123456789"
WAIT_S: Final = 600.0
LIMIT: Final = 256
"""Longest answer, in tokens."""
MICRO_BATCH: Final = 8
"""TRL's default per_device_train_batch_size; the plain loop has the same."""
SPREAD: Final = 0.15
"""Standard deviation of the old logprobs' differences: about a fifth of the ratios leave 0.8 to 1.2."""


@dataclass(frozen=True)
class Shape:
    """How large the batch is."""

    samples: int
    pairs: int
    median: int
    """Answers' lengths are lognormal around it, in tokens."""


def samples_of(batch: Mapping[str, Any]) -> list[Sample]:
    """What a policy gradient learns from."""
    return [
        sample(one["prompt"], one["response"], old=one["old"], reference=one["reference"], advantage=one["advantage"])
        for one in batch["samples"]
    ]


def sample(prompt: list[int], response: list[int], **of_tokens: Any) -> Sample:
    """Old logprobs stand where an engine's do."""
    tokens, mask = np.array(prompt + response), np.array([0.0] * len(prompt) + [1.0] * len(response), np.float32)
    columns = {name: np.zeros(len(tokens), np.float32) for name in ("old", "reference", "advantage")}
    for name, values in of_tokens.items():
        columns[name][len(prompt) :] = values
    return Sample(
        tokens,
        mask,
        prompt_length=len(prompt),
        rollout_log_probs=columns["old"],
        reference_log_probs=columns["reference"],
        advantages=columns["advantage"],
    )


def draw_batch(shape: Shape, vocabulary: int, seed: int = 0) -> dict[str, Any]:
    """JSON values; old and reference logprobs are those that `Bench` adds."""
    chance = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> list[int]:
        count = int(np.clip(chance.lognormal(np.log(shape.median), 0.8), least, most))
        drawn: list[int] = chance.integers(3, vocabulary, count).tolist()
        return drawn

    samples = [
        {"prompt": tokens(2, 2 * shape.median), "response": tokens(1, LIMIT), "advantage": float(chance.normal())}
        for _ in range(shape.samples)
    ]
    pairs = [
        {"prompt": tokens(2, 32), "chosen": tokens(1, LIMIT), "rejected": tokens(1, LIMIT), "margin": float(margin)}
        for margin in chance.uniform(0, 1, shape.pairs)
    ]
    return {"samples": samples, "pairs": pairs, "limit": LIMIT, "micro_batch": MICRO_BATCH}


@dataclass(eq=False)
class Bench:
    """A folder with models and batch, and ours of both."""

    folder: Path
    fields: Mapping[str, Any]
    batch: dict[str, Any]
    engine: EngineConfig

    def prepare(self, seed: int = 0) -> None:
        """Writes what the peers read; the batch gets its old and reference logprobs."""
        for number, (name, head) in enumerate((("model", "tokens"), ("reference", "tokens"), ("scorer", "value"))):
            source = ModelConfig(self.fields, number, dtype="float32", special_tokens=SPECIAL, head=head)  # type: ignore[arg-type]
            (self.folder / name).mkdir()
            with closing(self.backend(source)) as made:
                made.save(self.folder / name).result(WAIT_S)
            CharacterTokenizer(ALPHABET).save(self.folder / name)
        chance = np.random.default_rng(seed)
        scored = {}
        for name in ("model", "reference"):
            with closing(self.backend(self.config(name))) as made:
                plain = [sample(one["prompt"], one["response"]) for one in self.batch["samples"]]
                scored[name] = made.log_probs(plain).result(WAIT_S)
        for place, one in enumerate(self.batch["samples"]):
            first = len(one["prompt"])
            old = scored["model"][place][first:]
            one["old"] = [float(value) for value in old + chance.normal(0, SPREAD, len(old))]
            one["reference"] = scored["reference"][place][first:].tolist()
        (self.folder / "batch.json").write_text(json.dumps(self.batch))

    def config(self, name: str) -> ModelConfig:
        """Of one of the three models."""
        head = "value" if name == "scorer" else "tokens"
        return ModelConfig(self.folder / name, dtype="float32", special_tokens=SPECIAL, head=head)  # type: ignore[arg-type]

    def backend(self, model: ModelConfig) -> TorchBackend:
        """A fresh one."""
        optimizer = OptimizerConfig(learning_rate=1e-5, total_steps=1_000_000)
        return create_torch_backend(model, self.engine, optimizer, CheckpointConfig(fsync=False))


class PeerProcess:
    """A running `peers.py`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions = self._answer()

    def ask(self, **question: Any) -> dict[str, Any]:
        """Raises RuntimeError when it has ended."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], WAIT_S)
        line = self._process.stdout.readline() if ready else ""
        if not ready:
            raise RuntimeError(f"the peers' process did not answer within {WAIT_S:g} s")
        if not line:
            raise RuntimeError(f"the peers' process ended with status {self._process.wait(WAIT_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def peers(python: str, folder: Path, threads: int) -> Iterator[PeerProcess]:
    """Runs `peers.py` by TRL's interpreter."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    }
    argv = [python, str(Path(__file__).with_name("peers.py")), str(folder)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr.fileno(), text=True, env=environment
    ) as process:
        try:
            yield PeerProcess(process)
        finally:
            process.kill()
