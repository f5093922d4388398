"""The floor under the operator's benchmark sends what the operator makes for a job, no more and no less."""

from __future__ import annotations

from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def objects_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = spec_from_file_location("operator_floor", ROOT / "benchmarks/operator/floor.py")
    assert spec is not None
    assert spec.loader is not None
    floor = module_from_spec(spec)
    spec.loader.exec_module(floor)
    made: list[dict[str, Any]] = floor.objects_of(manifest)
    return made


def test_each_object_of_a_job_of_five_pods_is_sent_and_the_page_has_their_number() -> None:
    recipe = {
        "model": {"path": "model"},
        "data": {"rl": [{"path": "prompts.jsonl"}]},
        "reward": {"function": "rewards:exact"},
        "algorithm": {"steps": 4},
    }
    made = objects_of({
        "apiVersion": "polyrl.dev/v1alpha1",
        "kind": "PolyRLJob",
        "metadata": {"name": "j", "namespace": "ns"},
        "spec": {"recipe": recipe, "rollout": {"replicas": 3, "maxReplicas": 3}},
    })  # fmt: skip
    assert Counter(one["kind"] for one in made) == {
        "Secret": 7,  # all keys, those of three roles, those of three rollouts
        "Pod": 4,
        "NetworkPolicy": 3,
        "Service": 2,
        "PersistentVolumeClaim": 2,
        "ConfigMap": 1,
        "ServiceAccount": 1,
        "PodDisruptionBudget": 1,
        "Job": 1,
    }
    assert len({(one["kind"], one["metadata"]["name"]) for one in made}) == len(made)
    assert f"per job of five pods {len(made)} objects" in (ROOT / "docs/explanation/operator.md").read_text()
