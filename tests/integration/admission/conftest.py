"""The API server with our CRD in it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from polyrl.manifest.schema.crd import custom_resource_definition

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEADLINE_S = 60.0
POLL_S = 0.05


@pytest.fixture(scope="session")
def server(api_server: Any) -> Any:
    body = custom_resource_definition()
    path = f"{CRDS}/{body['metadata']['name']}?fieldManager=tests&force=true"
    status, answer = api_server.request("PATCH", path, body, content="application/apply-patch+yaml")
    assert status in (200, 201), answer
    established = api_server.kubectl(
        "wait", "crd/polyrljobs.polyrl.dev", "--for=condition=Established", "--timeout=30s"
    )
    assert established.returncode == 0, established.stderr
    # What serves it watches that condition as well, and may see it last. Asked of a namespace without jobs: other tests
    # leave some that no reader of JSON gets through.
    until = time.monotonic() + DEADLINE_S
    while api_server.request("GET", "/apis/polyrl.dev/v1alpha1/namespaces/nowhere/polyrljobs")[0] != 200:
        assert time.monotonic() < until, "the CRD is not served"
        time.sleep(POLL_S)
    return api_server
