"""A small valid job for all cluster tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MakeJob = Callable[..., dict[str, Any]]


@pytest.fixture
def make_job() -> MakeJob:
    """Raw PolyRLJob `j` in namespace `n`; keywords replace or add parts of its spec, `rollout` is merged."""

    def make(rollout: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
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

    return make
