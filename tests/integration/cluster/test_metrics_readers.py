"""The operator's metrics, asked for by real tokens of a real API server."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import yaml

CHART = Path(__file__).parents[3] / "charts/polyrl"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
OPERATOR, SCRAPER = "operator", "scraper"


def scraper_token(place: Any) -> str:
    """Of a new ServiceAccount, which may do nothing."""
    accounts = f"/api/v1/namespaces/{place.namespace}/serviceaccounts"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SCRAPER}}
    assert place.server.request("POST", accounts, account)[0] == 201
    ask = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    status, answer = place.server.request("POST", f"{accounts}/{SCRAPER}/token", ask)
    assert status == 201, answer
    return str(answer["status"]["token"])


def grant(place: Any, helm_program: str) -> None:
    """What the chart grants the operator and, by metrics.readers, the scraper; nothing else."""
    reader = f"metrics.readers[0].name={SCRAPER},metrics.readers[0].namespace={place.namespace}"
    command = [helm_program, "template", "polyrl", CHART, "-n", place.namespace, "--kube-version", "1.36.3"]
    command += ["--set=images.prefix=registry.example.org/", "--set", reader]
    command += ["--show-only", "templates/metrics-rbac.yaml"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    for one in filter(None, yaml.safe_load_all(text)):
        if one["kind"] == "ClusterRoleBinding" and not one["metadata"]["name"].endswith("reader"):
            one["subjects"] = [{"kind": "User", "name": OPERATOR, "apiGroup": "rbac.authorization.k8s.io"}]
        status, answer = place.server.request("POST", f"{RBAC}/{one['kind'].lower()}s", one)
        assert status == 201, answer


async def asked(url: str, token: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=False) as answer:
        return answer.status, await answer.text()


async def test_metrics_are_for_tokens_that_may_read_them(place: Any, start_operator: Any, helm_program: str) -> None:
    token = scraper_token(place)
    # Its leader's rights are missing, and not needed: a standby answers as well.
    kubeconfig = place.server.kubeconfig(OPERATOR)
    async with start_operator("--metrics-secure", kubeconfig=kubeconfig) as operator:
        url = f"https://127.0.0.1:{await operator.port_of('/metrics')}/metrics"
        assert (await asked(url, token))[0] == 503, "the operator may not ask who that is"
        grant(place, helm_program)

        async def status_of(given: str, wanted: int) -> str:
            status, text = await asked(url, given)
            return text or "empty" if status == wanted else ""

        text = await place.until("the scraper reads", lambda: status_of(token, 200))
        assert "polyrl_queue_length" in text
        assert (await asked(url))[0] == 401
        assert (await asked(url, "stranger"))[0] == 401
        status, text = await asked(url, "stranger-token")
        assert (status, text) == (403, ""), "known, and without the right"
        assert (await operator.get("/healthz"))[0] == 200, "health is plain"
    assert token not in str(operator.lines)
