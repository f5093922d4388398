"""The two jobs that are disturbed. Each is always the same, so that one undisturbed run is what all others must equal;
with steps ahead, up to the versions that engines happened to have, so that there only the hashed one can be compared.

    hashed   four steps of six prompts on two engines without a model; the trainer is `hash_trainer`. Seconds.
    real     three RL steps of eight prompts on two embedded engines, by the trainer itself. About half a minute.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from polyrl.manifest.job import PolyRLJob
from polyrl.worker import RunLocation, Worker, Workers, workers_of
from polyrl_cli.local.run_folder import RunFolder

HERE: Final = Path(__file__).parent

AHEAD: Final = "POLYRL_FAULTS_AHEAD"
"""Environment variable of the hashed job's trainer: the job's `maxStaleness`."""

ROLLOUTS: Final = 2
TRAINER_RESTARTS: Final = 4
"""As many as a run may have faults."""

HASHED_STEPS, HASHED_PROMPTS, HASHED_SAMPLES = 4, 6, 2
HASHED_TOKENS: Final = (20, 80)
"""Of a response: bounds, drawn per prompt."""

REAL_STEPS, REAL_PROMPTS, REAL_SAMPLES, REAL_TOKENS = 3, 8, 4, 32
ALPHABET: Final = "0123456789>"

REWARD: Final = '''"""How many of the response's characters are even digits; most responses differ in it."""


def score(sample):
    return sum(letter in "02468" for letter in sample.response) / 32
'''


@dataclass(frozen=True)
class JobKind:
    """One of the two."""

    name: str
    deadline_s: float
    """From the first process to the last one's end, whatever is injected; beyond it the run counts as hanging. On an
    idle machine the tenth part is enough."""
    spec: Callable[[], dict[str, Any]]
    trainer: str
    """Script in the trainer's place."""
    agent: str
    manager: str = "powered_manager.py"
    ahead: int = 0
    """Steps whose prompts are generated while one trains."""
    ranks: int = 1
    """Processes that learn."""

    def manifest(self) -> PolyRLJob:
        """Of the job."""
        kind = {"apiVersion": "polyrl.dev/v1alpha1", "kind": "PolyRLJob", "metadata": {"name": f"faults-{self.name}"}}
        spec = self.spec()
        spec["recipe"]["algorithm"]["maxStaleness"] = self.ahead
        spec["trainer"]["processesPerPod"] = self.ranks
        return PolyRLJob.model_validate({**kind, "spec": spec})

    def workers(self, folder: RunFolder, run_epoch: int) -> Workers:
        """The job's own, with the three scripts in their places."""
        place = RunLocation(
            str(folder.root),
            str(folder.root),
            python=sys.executable,
            run_epoch=run_epoch,
            cpus=len(os.sched_getaffinity(0)),
        )
        wanted = workers_of(self.manifest().spec, place)
        assert wanted.manager is not None
        assert wanted.rollout is not None
        trainer = dataclasses.replace(wanted.trainer, env={**wanted.trainer.env, AHEAD: str(self.ahead)})
        return dataclasses.replace(
            wanted,
            manager=started_by(wanted.manager, HERE / self.manager),
            trainer=started_by(trainer, HERE / self.trainer),
            rollout=started_by(wanted.rollout, HERE / self.agent),
        )


def started_by(worker: Worker, script: Path) -> Worker:
    """The worker with `script`, which may import its neighbours, in the place of its module."""
    python, flag, _, *rest = worker.argv
    return dataclasses.replace(worker, argv=(python, flag, "polyrl.testing.script", str(script), *rest))


def write_inputs(root: Path) -> None:
    """What the real job reads: prompts and a reward function."""
    dice = random.Random(0)
    rows = [{"prompt": "".join(dice.choices("0123456789", k=6)) + ">"} for _ in range(REAL_STEPS * REAL_PROMPTS)]
    (root / "rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD)


def _hashed_spec() -> dict[str, Any]:
    return {
        "recipe": {
            "mode": "rl",
            "model": {"path": "published by the stand-in"},
            "data": {"rl": [{"path": "rl.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": HASHED_STEPS},
            "sampling": {"maxNewTokens": HASHED_TOKENS[1]},
        },
        "trainer": {"reservedEngine": False},
        "backoffLimit": TRAINER_RESTARTS,
        "rollout": _rollout(128),
    }


def _real_spec() -> dict[str, Any]:
    return {
        "recipe": {
            "mode": "rl",
            "model": _model(),
            "data": {"rl": [{"path": "rl.jsonl"}], "shuffle": False},
            "reward": {"function": "reward:score"},
            "algorithm": {
                "steps": REAL_STEPS,
                "promptsPerStep": REAL_PROMPTS,
                "minMicroBatchSamples": REAL_SAMPLES,
                "optimizer": {"learningRate": 1e-3},
            },
            "sampling": {"samplesPerPrompt": REAL_SAMPLES, "maxNewTokens": REAL_TOKENS},
            "checkpoint": {"everySteps": 1},
            "logging": {"tensorboard": False},
        },
        "trainer": {"reservedEngine": False},
        "backoffLimit": TRAINER_RESTARTS,
        "rollout": _rollout(64),
    }


def _model() -> dict[str, Any]:
    config = {
        "model_type": "qwen2",
        "vocab_size": 3 + len(ALPHABET),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
    }
    return {"config": config, "tokenizer": {"type": "characters", "alphabet": ALPHABET}, "dtype": "float32"}


def _rollout(context: int) -> dict[str, Any]:
    engine = {"type": "embedded", "maxRunning": 32, "maxContext": context, "kvTokens": 32 * context}
    return {"replicas": ROLLOUTS, "maxReplicas": ROLLOUTS, "drainSeconds": 2, "engine": engine}


HASHED: Final = JobKind("hashed", 120.0, spec=_hashed_spec, trainer="hash_trainer.py", agent="hash_agent.py")
REAL: Final = JobKind("real", 400.0, spec=_real_spec, trainer="recording_trainer.py", agent="seeded_agent.py")
