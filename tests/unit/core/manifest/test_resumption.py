"""What may change when a run goes on, and what its checkpoints forbid."""

from copy import deepcopy
from typing import Any

import pytest

from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.rules.resumption import changed_fields
from polyrl.manifest.spec import JobSpec

BEGAN = {
    "recipe": {
        "mode": "sft+rl",
        "model": {
            "config": {"model_type": "qwen2", "hidden_size": 8},
            "tokenizer": {"type": "characters", "alphabet": "ab"},
        },
        "data": {"sft": [{"path": "s.jsonl"}], "rl": [{"path": "r.jsonl", "weight": 2}]},
        "sft": {"steps": 2},
        "algorithm": {"steps": 4},
        "reward": {"function": "reward:score"},
    },
    "rollout": {"engine": {"type": "embedded"}},
}

CHANGES = [
    # path, value, the field that is refused
    ("recipe.seed", 3, "recipe.seed"),
    ("recipe.mode", "rl", "recipe.mode"),
    ("recipe.model.config.hidden_size", 16, "recipe.model.config.hidden_size"),
    ("recipe.model.tokenizer.alphabet", "abc", "recipe.model.tokenizer.alphabet"),
    ("recipe.data.shuffle", False, "recipe.data.shuffle"),
    ("recipe.model.revision", "main", "recipe.model.revision"),
    ("recipe.data.rl", [{"path": "r.jsonl", "weight": 3}], "recipe.data.rl"),
    ("recipe.data.sft", [{"path": "s.jsonl"}, {"path": "t.jsonl"}], "recipe.data.sft"),
    ("recipe.data.sft", [{"path": "moved/s.jsonl"}], None),
    ("recipe.data.eval", [{"path": "e.jsonl"}], None),
    ("recipe.algorithm.steps", 40, None),
    ("recipe.algorithm.promptsPerStep", 8, None),
    ("recipe.algorithm.klCoefficient", 0.1, None),
    ("recipe.sampling.samplesPerPrompt", 4, None),
    ("recipe.algorithm", {"steps": 4, "advantage": "gae", "oldLogProbs": "recompute"}, "recipe.algorithm.advantage"),
    ("recipe.algorithm", {"steps": 4, "advantage": "rloo"}, None),
    ("recipe.algorithm.optimizer", {"name": "adamw_8bit"}, "recipe.algorithm.optimizer.name"),
    ("recipe.algorithm.optimizer", {"name": "adamw", "learningRate": 1e-5}, None),
    ("recipe.algorithm.critic", {"optimizer": {"name": "adamw_8bit"}}, "recipe.algorithm.critic.optimizer.name"),
    ("recipe.sft.optimizer", {"name": "adamw_8bit"}, "recipe.sft.optimizer.name"),
    ("recipe.dpo", {"optimizer": {"name": "adamw_8bit"}}, "recipe.dpo.optimizer.name"),
    ("recipe.rewardModel", {"optimizer": {"name": "adamw_8bit"}}, "recipe.rewardModel.optimizer.name"),
    ("recipe.data.preferences", [{"path": "p.jsonl"}], "recipe.data.preferences"),
    ("recipe.model.dtype", "float32", None),
    ("recipe.model.lora", {"rank": 4}, "recipe.model.lora"),
    ("recipe.model.lora", None, None),
    ("rollout.maxReplicas", 7, None),
]


def spec_of(raw: dict[str, Any]) -> JobSpec:
    manifest = {"apiVersion": "polyrl.dev/v1alpha1", "kind": "PolyRLJob", "metadata": {"name": "j"}, "spec": raw}
    return PolyRLJob.model_validate(manifest).spec


@pytest.mark.parametrize(("path", "value", "refused"), CHANGES, ids=[f"{path}: {value}" for path, value, _ in CHANGES])
def test_only_what_checkpoints_were_made_for_is_fixed(path: str, value: object, refused: str | None) -> None:
    now: Any = deepcopy(BEGAN)
    *above, last = path.split(".")
    held = now
    for key in above:
        held = held.setdefault(key, {})
    held[last] = value
    assert [".".join(field) for field, _ in changed_fields(spec_of(BEGAN), spec_of(now))] == (
        [refused] if refused else []
    )


@pytest.mark.parametrize(
    ("critic", "refused"),
    [({"trunk": "shared"}, ["recipe.algorithm.critic.trunk"]), ({"gaeLambda": 0.5}, [])],
    ids=["trunk", "lambda"],
)
def test_of_a_critic_its_trunk_is_fixed(critic: dict[str, Any], refused: list[str]) -> None:
    began, now = deepcopy(BEGAN), deepcopy(BEGAN)
    began["recipe"]["algorithm"] = {"steps": 4, "name": "ppo", "oldLogProbs": "recompute"}
    now["recipe"]["algorithm"] = {**began["recipe"]["algorithm"], "critic": critic}
    assert [".".join(field) for field, _ in changed_fields(spec_of(began), spec_of(now))] == refused


def test_the_sentence_names_both_values_where_they_are_short() -> None:
    now: Any = deepcopy(BEGAN)
    now["recipe"]["seed"] = 7
    ((_, sentence),) = changed_fields(spec_of(BEGAN), spec_of(now))
    assert sentence == "was 0 when the run began, 7 now; put it back, or begin a new run"


@pytest.mark.parametrize(
    ("change", "refused"),
    [({"rank": 8}, True), ({"alpha": 1.0}, True), ({"targetModules": ["q"]}, True), ({"dropout": 0.1}, False)],
    ids=["rank", "alpha", "targets", "dropout"],
)
def test_of_adapters_their_shape_and_place_are_fixed(change: dict[str, Any], refused: bool) -> None:
    began, now = deepcopy(BEGAN), deepcopy(BEGAN)
    for raw in (began, now):
        raw |= {"recipe": {**raw["recipe"], "mode": "sft"}}
    began["recipe"]["model"]["lora"] = {"rank": 4}  # type: ignore[index]
    now["recipe"]["model"]["lora"] = {"rank": 4, **change}  # type: ignore[index]
    assert bool(changed_fields(spec_of(began), spec_of(now))) is refused
