"""URLs of objects, and the permission that each request needs."""

from __future__ import annotations

import pytest

from polyrl_operator.api.kinds import CLAIM, JOB, POD, Permission, permission_for


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (POD.path("ns", "p"), "/api/v1/namespaces/ns/pods/p"),
        (POD.path(), "/api/v1/pods"),
        (JOB.path("ns", "j", "status"), "/apis/polyrl.dev/v1alpha1/namespaces/ns/polyrljobs/j/status"),
        (CLAIM.path("ignored", "c"), "/apis/karpenter.sh/v1/nodeclaims/c"),
    ],
)
def test_paths(path: str, expected: str) -> None:
    assert path == expected


@pytest.mark.parametrize(
    ("method", "path", "watch", "expected"),
    [
        ("GET", "/api/v1/namespaces/ns/pods", False, Permission("list", "", resource="pods")),
        ("GET", "/api/v1/pods", True, Permission("watch", "", resource="pods")),
        ("GET", "/api/v1/namespaces/ns/pods/p", False, Permission("get", "", resource="pods")),
        ("POST", "/api/v1/namespaces/ns/pods", False, Permission("create", "", resource="pods")),
        ("PATCH", "/apis/polyrl.dev/v1alpha1/namespaces/ns/polyrljobs/j/status", False,
         Permission("patch", "polyrl.dev", resource="polyrljobs/status")),
        ("DELETE", "/apis/batch/v1/namespaces/ns/jobs/j", False, Permission("delete", "batch", resource="jobs")),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/ns/leases/l", False,
         Permission("update", "coordination.k8s.io", resource="leases")),
        ("GET", "/api/v1/nodes/n", False, Permission("get", "", resource="nodes")),
        ("GET", "/apis/karpenter.sh/v1", False, Permission("get", "", resource="/apis/karpenter.sh/v1")),
    ],
)  # fmt: skip
def test_the_permission_that_a_request_needs(method: str, path: str, watch: bool, expected: Permission) -> None:
    assert permission_for(method, path, watch) == expected
