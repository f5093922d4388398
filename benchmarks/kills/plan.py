"""What one measurement is: how many kills, how often, of which engines, on responses how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from polyrl.manifest.job import PolyRLJob

PROMPTS, PROMPT_TOKENS = 24, 12
GROUPS_IN_FLIGHT, SAMPLES_PER_GROUP = 12, 2
SAMPLES_IN_FLIGHT: Final = GROUPS_IN_FLIGHT * SAMPLES_PER_GROUP

MODEL: Final[dict[str, Any]] = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}

SGLANG_ON_CPU: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--skip-server-warmup", "--disable-overlap-schedule", "--max-total-tokens", "32768"),
)

START_S: Final = {"embedded": 60.0, "sglang": 300.0}
"""Longest start of an engine on cores that are shared; an idle machine takes a tenth."""

MAX_RUNNING: Final = {"embedded": 32, "sglang": 16}
"""Samples on one engine; of two that start minutes apart the first must not take all that is in flight."""


@dataclass(frozen=True)
class Plan:
    """One measurement; all of its randomness follows from `seed`."""

    kills: int
    seed: int
    tokens: int
    """Of each response."""
    tokens_between: tuple[int, int]
    """Accepted tokens from one kill to the next: bounds of an even draw."""
    rollouts: int = 3
    engine: str = "embedded"
    exits_reported: bool = True
    """The runner reports to the manager that a process has ended; else the manager learns it from silence alone."""

    @property
    def start_s(self) -> float:
        """Longest start of an engine."""
        return START_S[self.engine]

    def job(self) -> PolyRLJob:
        """The manifest of the run."""
        return PolyRLJob.model_validate(
            {
                "apiVersion": "polyrl.dev/v1alpha1",
                "kind": "PolyRLJob",
                "metadata": {"name": "kills"},
                "spec": {"recipe": self._recipe(), "trainer": {"reservedEngine": False}, "rollout": self._rollout()},
            }
        )

    def workload(self, prompts: list[list[int]]) -> dict[str, Any]:
        """What the trainer's stand-in submits."""
        return {
            "config": MODEL,
            "seed": self.seed,
            "prompts": prompts,
            "tokens": self.tokens,
            "groupsInFlight": GROUPS_IN_FLIGHT,
            "samplesPerGroup": SAMPLES_PER_GROUP,
            "nextDeadlineSeconds": self.start_s,
        }

    def _recipe(self) -> dict[str, Any]:
        return {
            "mode": "rl",
            "model": {"path": "published by the workload"},
            "data": {"rl": [{"path": "rl.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": 1},
            "sampling": {"maxNewTokens": self.tokens},
        }

    def _rollout(self) -> dict[str, Any]:
        context, running = PROMPT_TOKENS + self.tokens, MAX_RUNNING[self.engine]
        engine: dict[str, Any] = {"type": self.engine, "maxRunning": running, "maxContext": context}
        engine["kvTokens"] = running * context
        if self.engine == "sglang":
            engine["args"] = list(SGLANG_ON_CPU)
        return {"replicas": self.rollouts, "maxReplicas": self.rollouts, "engine": engine}
