"""Pod templates of odd types become a sentence, and whatever is taken becomes a pod."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.manifest.cluster import PodTemplate
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Pool
from polyrl.testing.job_values import raw_job

SETTINGS = Settings(manager_image="m", trainer_image="t", rollout_image="r")
MAIN = {"name": "main"}


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [MAIN], **fields}}


def container(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{**MAIN, **fields}]}}


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (spec(tolerations=5), "spec.tolerations: expected `array`, got `int`"),
        (spec(volumes="abc"), "spec.volumes: expected `array`, got `str`"),
        (spec(volumes=[{}]), "spec.volumes[0]: object missing required field `name`"),
        (spec(initContainers=["x"]), "spec.initContainers[0]: expected `object`, got `str`"),
        (container(env=["a"]), "spec.containers[0].env[0]: expected `object`, got `str`"),
        (container(env=[{}]), "spec.containers[0].env[0]: object missing required field `name`"),
        (container(resources={"limits": {"cpu": ["a"]}}), "spec.containers[0].resources.limits[...]: expected"),
        ({**spec(), "metadata": {"annotations": "x"}}, "metadata.annotations: expected `object`, got `str`"),
        ({**spec(), "metadata": {"labels": {"a": 1}}}, "metadata.labels[...]: expected `str`, got `int`"),
        (spec(securityContext=[]), "spec.securityContext: expected `object`, got `array`"),
    ],
    ids=[
        "tolerations that are a number",
        "volumes that are text",
        "a volume without a name",
        "a container that is text",
        "a variable that is text",
        "a variable without a name",
        "an amount that is a list",
        "annotations that are text",
        "a label that is a number",
        "a securityContext that is a list",
    ],
)
def test_what_the_merge_cannot_take_is_named(template: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PodTemplate.model_validate(template)
    assert sentence in str(refused.value)


def test_a_field_that_is_null_is_absent_at_any_depth() -> None:
    given = container(env=[{"name": "A", "valueFrom": {"fieldRef": None, "secretKeyRef": {"name": "a", "key": None}}}])
    given["metadata"] = {"labels": None}
    kept = PodTemplate.model_validate(given).model_dump(mode="json", by_alias=True, exclude_unset=True)
    entry = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "a"}}}
    assert kept == {"metadata": {}, "spec": {"containers": [{"name": "main", "env": [entry]}]}}


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["", "a", "1e999", "nan", "9" * 400]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "key", "cpu"]), inner, max_size=2)
    ),
    max_leaves=4,
)
RESOURCES = st.fixed_dictionaries({}, optional={part: ODD for part in ("limits", "requests")}) | ODD
CONTAINERS = st.fixed_dictionaries(
    {"name": st.just("main")},
    optional={key: ODD for key in ("env", "volumeMounts", "securityContext", "image", "ports")}
    | {"resources": RESOURCES},
)
NODE_AFFINITY = st.fixed_dictionaries(
    {}, optional={"requiredDuringSchedulingIgnoredDuringExecution": st.fixed_dictionaries({"nodeSelectorTerms": ODD})}
)
TEMPLATES = st.fixed_dictionaries(
    {
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(CONTAINERS, min_size=1, max_size=2)},
            optional={key: ODD for key in ("tolerations", "volumes", "securityContext", "nodeSelector")}
            | {"initContainers": ODD | st.lists(CONTAINERS, max_size=1)}
            | {"affinity": ODD | st.fixed_dictionaries({"nodeAffinity": ODD | NODE_AFFINITY})},
        )
    },
    optional={"metadata": ODD | st.fixed_dictionaries({}, optional={"labels": ODD, "annotations": ODD})},
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, print_blob=True)
@given(TEMPLATES)
def test_what_is_taken_becomes_a_pod(template: dict[str, Any]) -> None:
    raw = raw_job()
    for role in ("rollout", "trainer", "manager"):
        raw["spec"].setdefault(role, {})["template"] = template
    try:
        job = PolyRLJob.model_validate(raw)
    except ValidationError:
        return
    owner = Owner("job", "ns", "6b8c1f0e-0000-4000-8000-000000000000", job=job, settings=SETTINGS)
    for made in (manager_pod(owner, 1), rollout_pod(owner, 1, Pool.SPOT), trainer_job(owner)["spec"]["template"]):
        assert made["spec"]["containers"][0]["command"]
