"""The chart's policy on authors and the operator's NetworkPolicy agree on which jobs open public addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import celpy
import pytest
from celpy.adapter import json_to_cel

from polyrl.cluster.resources import network
from polyrl.manifest.spec import JobSpec

POLICIES: Final = Path(__file__).parents[3] / "charts/polyrl/templates/_policies.tpl"
DATA: Final = {"rl": [{"path": "a"}]}
PATHS: Final = (
    *("Qwen/Qwen3-0.6B", "hf://a/b@main", "s3://bucket/m", "gs://bucket/m", "file:///m", "_a/b", "a/b/c", "/models/m"),
    *("pvc://claim/m", "model", "https://host/m"),
)


def opens(spec: dict[str, Any]) -> bool:
    """By the chart's CEL."""
    found = re.search(r'define "polyrl.publicHttps" -}}(.*?){{- end', POLICIES.read_text(), re.S)
    assert found is not None
    environment = celpy.Environment()
    program = environment.program(environment.compile(" ".join(found[1].split())))
    return bool(program.evaluate({"object": json_to_cel({"spec": spec})}))


def job(**recipe: Any) -> dict[str, Any]:
    return {"recipe": {"mode": "rl", "data": DATA, "model": {"path": "m"}, **recipe}}


def one_set(path: str) -> dict[str, Any]:
    return {"name": "one", "data": [{"path": path}]}


KINDS: Final = ("sft", "rl", "preferences", "eval")
ROWS: Final = ("hf://datasets/a/b/c.jsonl", "s3://bucket/c.parquet")
SPECS: Final = [
    *(job(model={"path": path}) for path in PATHS),
    *(job(logging={"wandb": wandb}) for wandb in ({}, {"mode": "offline"}, {"mode": "online"})),
    *(
        {**job(model={"path": path}), "networkPolicy": {"publicHttps": choice}}
        for path in ("a/b", "m")
        for choice in ("Auto", "Always", "Never")
    ),
    *(job(data=DATA | {kind: [{"path": "a.jsonl"}, {"path": uri}]}) for kind in KINDS for uri in ROWS),
    *(job(data=DATA | {"eval": [{"path": "a"}]}, evaluation={"sets": [one_set(uri)]}) for uri in ("a.jsonl", *ROWS)),
    job(),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_policy_asks_where_the_operator_opens(spec: dict[str, Any]) -> None:
    read = JobSpec.model_validate(spec, by_alias=True, by_name=False)
    assert opens(spec) == network._needs_public(read)


def test_a_job_without_a_network_policy_opens_nothing() -> None:
    assert not opens({**job(), "networkPolicy": {"mode": "None", "publicHttps": "Always"}})
