"""No credential stands in a manifest: places that hold one are refused, and the refusal does not show it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import pytest
from pydantic import TypeAdapter

from polyrl.errors import InvalidManifest
from polyrl.manifest.base import Place
from polyrl_cli.manifests.load import job_of
from polyrl_cli.manifests.yaml_source import ManifestSource

SECRET: Final = "hunter2"
JOB: Final[dict[str, Any]] = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "a"},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {"path": "Qwen/Qwen3-0.6B"},
            "data": {"rl": [{"path": "rl.jsonl"}], "eval": [{"path": "eval.jsonl"}]},
            "algorithm": {"steps": 1},
            "reward": {"function": "reward:score"},
        },
        "rollout": {"engine": {"type": "embedded"}},
    },
}
PLACES: Final = {
    "model.path": lambda recipe, text: recipe["model"].update(path=text),
    "model.tokenizer.path": lambda recipe, text: recipe["model"].update(tokenizer={"path": text}),
    "checkpoint.uri": lambda recipe, text: recipe.update(checkpoint={"uri": text}),
    "data.rl[0].path": lambda recipe, text: recipe["data"]["rl"][0].update(path=text),
    "data.eval[0].path": lambda recipe, text: recipe["data"].update(eval=[{"path": text}]),
    "evaluation.sets[0].data[0].path": lambda recipe, text: recipe.update(
        evaluation={"sets": [{"name": "a", "data": [{"path": text}]}]}
    ),
    "logging.mlflow.trackingUri": lambda recipe, text: recipe.update(logging={"mlflow": {"trackingUri": text}}),
}
HELD: Final = (
    f"https://user:{SECRET}@host/model",
    f"https://{SECRET}@host/model",
    f"s3://key:{SECRET}@bucket",
    f"hf://{SECRET}@host/model",
    f"s3://bucket/model?X-Amz-Signature={SECRET}",
    f"s3://bucket/model#{SECRET}",
)
ELSEWHERE: Final = (
    f"s3://key:{SECRET}",
    f"simplecache::s3://bucket/{SECRET}",
    f"s3://bucket/{SECRET}::file:///a",
    f"zip://a::{SECRET}",
)
"""Not of MLflow's tracking, whose server has a port."""


@pytest.mark.parametrize("text", [*HELD, *ELSEWHERE])
@pytest.mark.parametrize("field", PLACES)
def test_a_place_with_a_credential_is_refused_in_one_sentence_that_does_not_show_it(field: str, text: str) -> None:
    if text in ELSEWHERE and field == "logging.mlflow.trackingUri":
        return
    job = deepcopy(JOB)
    PLACES[field](job["spec"]["recipe"], text)
    with pytest.raises(InvalidManifest) as refused:
        job_of(ManifestSource("job.yaml", job))
    (fault,) = refused.value.faults
    assert f"spec.recipe.{field}: is no place without credentials; write it as" in fault
    assert SECRET not in fault


@pytest.mark.parametrize("field", PLACES)
def test_the_same_job_with_an_open_place_is_taken(field: str) -> None:
    job = deepcopy(JOB)
    PLACES[field](job["spec"]["recipe"], "s3://bucket/2026-01-01T10:00/rows.jsonl")
    job_of(ManifestSource("job.yaml", job))


@pytest.mark.parametrize(
    "text",
    [
        *("rows.jsonl", "/data/a b.jsonl", "../a@b/c?d#e", "run 10:30/rows.jsonl", "Qwen/Qwen3-0.6B"),
        *("hf://Qwen/Qwen3-0.6B@main", "s3://bucket", "gs://bucket/a/b", "file:///models/m", "pvc://claim/m"),
    ],
)
def test_paths_and_open_uris_stay_right(text: str) -> None:
    assert TypeAdapter(Place).validate_python(text) == text
