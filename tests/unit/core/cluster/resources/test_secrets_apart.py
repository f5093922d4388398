"""No pod of a job reaches another role's or another job's keys, whatever the jobs are called: each role has a Secret of
its own, and no two jobs of a namespace share a name of anything."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from polyrl.cluster import names
from polyrl.cluster.actions import MakeKeys
from polyrl.cluster.resources.fixed import fixed_children
from polyrl.cluster.resources.owner import Owner
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.manifest.job import PolyRLJob
from polyrl.sample import Pool
from polyrl.testing.fake_operator import SETTINGS
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role
from polyrl_operator.secret import engine_secret, keys_secret, role_secrets

OF_ROLE = {
    Role.TRAINER: {"trainer.key", "agent.key"},
    Role.MANAGER: {"manager.key", "ca.crt", "tls.crt", "tls.key"},
    Role.ROLLOUT: {"agent.key"},
}
"""Files that a pod of the role may see; the trainer's also runs the reserved engine's agent."""
PARTS = st.sampled_from(["a", "r", "keys", "manager", "trainer", "cfg", "1", "10"])
JOBS = st.lists(PARTS, min_size=1, max_size=5).map("-".join)
"""Names made of what we add to names."""


def owner_of(name: str) -> Owner:
    raw = raw_job()
    raw["metadata"]["name"] = name
    return Owner(name, "n", f"uid-{name}", PolyRLJob.model_validate(raw), SETTINGS)


def pods_of(owner: Owner) -> dict[Role, dict[str, Any]]:
    return {
        Role.TRAINER: trainer_job(owner)["spec"]["template"]["spec"],
        Role.MANAGER: manager_pod(owner, 1)["spec"],
        Role.ROLLOUT: rollout_pod(owner, 1, Pool.SPOT)["spec"],
    }


def secrets_of(pod: Any) -> list[str]:
    """Every Secret that is named anywhere in a pod, by whatever way of reaching one there is."""
    found = []
    if isinstance(pod, dict):
        for key, value in pod.items():
            if key == "secretName" or (key in ("secret", "secretRef", "secretKeyRef") and "name" in value):
                found.append(value if isinstance(value, str) else value["name"])
            found += secrets_of(value)
    elif isinstance(pod, list):
        found = [name for one in pod for name in secrets_of(one)]
    return found


@pytest.mark.parametrize("role", list(OF_ROLE))
def test_a_taken_node_reads_no_other_roles_keys_from_the_secrets_that_its_pods_name(role: Role) -> None:
    """A kubelet may read every Secret that its pods name, and all of it, whatever items they mount."""
    owner = owner_of("job")
    pod = pods_of(owner)[role]
    action = MakeKeys(names.keys_secret_name("job"), ("job-manager",), now=0.0)
    root = keys_secret(owner, action)
    root["metadata"]["uid"] = "root-uid"
    made = (root, *role_secrets(owner, root, action), engine_secret(owner, root, "job-r-1", "uid"))
    stored = {one["metadata"]["name"]: one["data"] for one in made}
    granted = {file for name in secrets_of(pod) for file in stored[name]}
    mounted = {item["path"] for volume in pod["volumes"] if "secret" in volume for item in volume["secret"]["items"]}
    assert mounted == granted == OF_ROLE[role]
    assert not pod.get("imagePullSecrets")


def test_nothing_of_a_pod_says_a_secret() -> None:
    """Keys are files: a command line or an environment shows to whoever may look at pods."""
    for pod in pods_of(owner_of("job")).values():
        for one in (*pod.get("initContainers", []), *pod["containers"]):
            assert not one.get("envFrom")
            message = [*one.get("command", []), *one.get("args", []), *(v.get("value", "") for v in one.get("env", []))]
            assert all(variable.get("valueFrom", {}).keys() <= {"fieldRef"} for variable in one.get("env", []))
            assert not [word for word in message if re.search(r"[0-9a-f]{32}|[A-Za-z0-9+/]{40}", word)], message


def named(job: str) -> set[tuple[str, str]]:
    """Kind and name of all that a job has, with pods of many numbers."""
    owner = owner_of(job)
    pods = {names.pod_name(job, role, number) for role in (Role.MANAGER, Role.ROLLOUT) for number in range(1, 12)}
    objects = (*fixed_children(owner), trainer_job(owner))
    made = {(one["kind"], one["metadata"]["name"]) for one in objects}
    secrets = {names.keys_secret_name(job), *(names.role_secret_name(job, role) for role in names.KEY_FILES)}
    return made | {("Secret", name) for name in secrets | pods} | {("Pod", pod) for pod in pods}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(one=JOBS, other=JOBS)
def test_two_jobs_share_no_name(one: str, other: str) -> None:
    assume(one != other)
    assert not named(one) & named(other)
