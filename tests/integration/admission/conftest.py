"""The API server with our CRD in it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.manifest.schema.crd import custom_resource_definition

CHART = Path(__file__).parents[3] / "charts/polyrl"
POLICIES = "/apis/admissionregistration.k8s.io/v1"
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


@pytest.fixture(scope="session")
def guarded_by(server: Any, helm_program: str) -> Callable[..., AbstractContextManager[None]]:
    """Gives the server one policy of the chart's, as Helm renders it, while the context lasts: `refuses` asks for
    something that it forbids, and is true once that is refused, since the server compiles it a moment later."""

    @contextmanager
    def at_work(file: str, *values: str, refuses: Callable[[], bool]) -> Iterator[None]:
        command = [helm_program, "template", "polyrl", CHART, "-n", "polyrl-system", "--kube-version", "1.36.3"]
        command += ["--set=images.prefix=r.example.org/", "--show-only", f"templates/{file}"]
        command += [part for value in values for part in ("--set-json", value)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        made = []
        for one in yaml.safe_load_all(text):
            policy = one["kind"] == "ValidatingAdmissionPolicy"
            path = f"{POLICIES}/{'validatingadmissionpolicies' if policy else 'validatingadmissionpolicybindings'}"
            status, answer = server.request("POST", path, one)
            assert status == 201, str(answer)
            made.append(f"{path}/{one['metadata']['name']}")
        until = time.monotonic() + DEADLINE_S
        while not refuses():
            assert time.monotonic() < until, "the policy is not at work"
            time.sleep(POLL_S)
        try:
            yield
        finally:
            for path in made:
                server.request("DELETE", path)

    return at_work
