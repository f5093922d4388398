"""Hashes of pods' templates as every operator since this file has made them: another value here would replace the pods
of every running job at an upgrade of the operator. Add rows; change none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyrl.cluster.resources.owner import Owner, template_hash
from polyrl.cluster.resources.workers import rollout_pod
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Pool
from polyrl.testing.fake_operator import SETTINGS
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role

TEMPLATE = {
    "spec": {"containers": [{"name": "x", "image": "theirs:1", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}
}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "spot on Karpenter": {"rollout": {"capacity": {"preset": "Karpenter"}, "drainSeconds": 60}},
    "templates": {"rollout": {"template": TEMPLATE}, "trainer": {"template": TEMPLATE}, "manager": {"port": 6000}},
}
KEPT: dict[str, tuple[str, str, str]] = {
    "plain": ("a4122ca324", "fd1536c1f3", "95aa16b904"),
    "spot on Karpenter": ("e2fd7c774b", "3de6352d9a", "091248fabe"),
    "templates": ("3c96c2f2df", "cee983744e", "6f57c3b71b"),
}
"""Of trainer, manager and rollout."""


@pytest.mark.parametrize("name", SPECS)
def test_an_upgrade_replaces_no_pod(name: str) -> None:
    spec = dict(SPECS[name])
    job = PolyRLJob.model_validate(raw_job(spec.pop("rollout", None), **spec))
    owner = Owner("j", "n", "uid", job, SETTINGS)
    assert tuple(template_hash(owner, role) for role in (Role.TRAINER, Role.MANAGER, Role.ROLLOUT)) == KEPT[name]


def test_after_an_upgrade_only_new_pods_have_the_new_default_image() -> None:
    job = PolyRLJob.model_validate(raw_job(None))
    before, after = (Owner("j", "n", "uid", job, replace(SETTINGS, rollout_image=image)) for image in ("r:1", "r:2"))
    assert template_hash(before, Role.ROLLOUT) == template_hash(after, Role.ROLLOUT)
    assert rollout_pod(after, 7, Pool.SPOT)["spec"]["containers"][0]["image"] == "r:2"
