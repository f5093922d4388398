"""A small valid PolyRLJob as a raw object, for tests that need any job at all."""

from __future__ import annotations

from typing import Any


def raw_job(rollout: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """PolyRLJob `j` in namespace `n`; keywords replace or add parts of its spec, `rollout` is merged."""
    recipe: dict[str, Any] = {
        "mode": "rl",
        "model": {"path": "/model"},
        "data": {"rl": [{"path": "rl.jsonl"}]},
        "reward": {"function": "reward:score"},
        "algorithm": {"steps": 10},
    }
    fleet = {"minReplicas": 0, "maxReplicas": 6, "replicas": 3, "drainSeconds": 5} | (rollout or {})
    return {
        "apiVersion": "polyrl.dev/v1alpha1",
        "kind": "PolyRLJob",
        "metadata": {"name": "j", "namespace": "n", "uid": "job", "generation": 1},
        "spec": {"recipe": recipe, "rollout": fleet} | spec,
    }
