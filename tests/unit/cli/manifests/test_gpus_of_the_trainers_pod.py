"""Processes that learn in a trainer's pod, counted by its template, where the template itself is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrl.errors import InvalidManifest
from polyrl_cli.manifests.load import load_manifest

GOOD = """\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata: {name: sort}
spec:
  recipe:
    model: {path: model}
    data: {rl: [{path: rl.jsonl}]}
    algorithm: {steps: 4}
    reward: {function: "reward:score"}
"""


@pytest.mark.parametrize(
    ("container", "slices", "words"),
    [
        ("{name: a, resources: {limits: {nvidia.com/gpu: 4}}, volumeMounts: 3}", 4, []),
        ("{name: a, image: 5, resources: {limits: {nvidia.com/gpu: 4}}}", 4, []),
        ("{name: a, image: 5, resources: {limits: {nvidia.com/gpu: 4}}}", 3, ["3 does not divide"]),
        ("{name: a, image: 5}", 3, ["3 does not divide"]),
    ],
    ids=["GPUs in a wrong template", "beside a wrong image", "that slices do not divide", "no GPUs"],
)
def test_gpus_in_a_wrong_template_are_blamed_on_nothing_else(
    tmp_path: Path, container: str, slices: int, words: list[str]
) -> None:
    pod = f"{{spec: {{containers: [{container}]}}}}"
    manifest = tmp_path / "job.yaml"
    manifest.write_text(GOOD)
    sets = [f"spec.trainer.template={pod}", f"spec.trainer.contextParallel={slices}"]
    with pytest.raises(InvalidManifest) as refused:
        load_manifest(manifest, sets)
    faults = refused.value.faults
    others = [one for one in faults if "spec.trainer.template" not in one]
    assert len(others) == len(words) == len(faults) - 1
    assert all(word in one for word, one in zip(words, others, strict=True))
