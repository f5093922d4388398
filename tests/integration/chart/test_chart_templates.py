"""The chart without a cluster: it lints, renders as written down, refuses slips by their path, and holds our CRD.

POLYRL_UPDATE_SNAPSHOTS=1 writes the snapshots anew; read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
IMAGES = "--set=images.prefix=registry.example.org/polyrl/"
ROOT = HERE.parents[2]
CHART = ROOT / "charts/polyrl"
VALUES: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "values.yaml").read_text())

SLIPS: list[tuple[dict[str, Any], str]] = [
    ({"image": {"tag": "1"}}, "'image' not allowed"),
    ({"images": {"operatr": "a"}}, "at '/images'"),
    ({"images": {"operator": {"repository": "a"}}}, "at '/images/operator'"),
    ({"images": {"operator": "Example.org/a"}}, "at '/images/operator'"),
    ({"images": {"pullPolicy": "Sometimes"}}, "at '/images/pullPolicy'"),
    ({"watch": {"namespaces": "team-a"}}, "at '/watch/namespaces'"),
    ({"watch": {"namespaces": ["Team"]}}, "at '/watch/namespaces/0'"),
    ({"watch": {"namespaces": ["a", "a"]}}, "at '/watch/namespaces'"),
    ({"replicas": 3}, "at '/replicas'"),
    ({"replicas": "1"}, "at '/replicas'"),
    ({"metrics": {"port": 80}}, "at '/metrics/port'"),
    ({"metrics": {"monitors": {"interval": "often"}}}, "at '/metrics/monitors/interval'"),
    ({"metrics": {"monitors": {"enable": True}}}, "at '/metrics/monitors'"),
    ({"metrics": {"jobs": {"port": 5001}}}, "at '/metrics/jobs/port'"),
    ({"crds": {"install": "no"}}, "at '/crds/install'"),
    ({"log": {"level": "loud"}}, "at '/log/level'"),
    ({"cluster": {"dnsAddresses": ["kube-dns"]}}, "at '/cluster/dnsAddresses/0'"),
    ({"networkPolicy": {"apiServer": {"ports": []}}}, "at '/networkPolicy/apiServer/ports'"),
    ({"nodeSelector": {"a": 1}}, "at '/nodeSelector/a'"),
    ({"extraArgs": [1]}, "at '/extraArgs/0'"),
    ({"podLabels": {"app.kubernetes.io/component": "mine"}}, "at '/podLabels/"),
    ({"podLabels": {"helm.sh/chart": "mine"}}, "at '/podLabels/"),
    ({"podAnnotations": {"kubectl.kubernetes.io/default-container": "mine"}}, "at '/podAnnotations/"),
    ({"health": {"port": 8080}}, "health.port: 8080 is metrics.port; the operator listens on both"),
    ({"metrics": {"port": 8081}}, "health.port: 8081 is metrics.port"),
]


def test_lint_finds_nothing(helm: Any) -> None:
    answer = helm("lint", "--strict", CHART)
    assert answer.returncode == 0, answer.stdout


@pytest.mark.parametrize(("values", "path"), SLIPS, ids=lambda given: str(given))
def test_a_slip_is_refused_by_its_path(template: Any, values: dict[str, Any], path: str) -> None:
    answer = template(values)
    assert answer.returncode != 0
    assert path in answer.stderr


def test_every_value_is_described_by_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def check(node: dict[str, Any], given: Any, path: str) -> None:
        properties = node.get("properties")
        if properties is None or not isinstance(given, dict):
            return
        assert node["additionalProperties"] is False, f"{path} takes any slip"
        assert given.keys() <= properties.keys(), path
        for key, value in given.items():
            check(properties[key], value, f"{path}.{key}")

    check(schema, values, "")


@pytest.mark.parametrize("name", VALUES)
def test_it_renders_as_written_down(render: Any, name: str) -> None:
    objects = render(VALUES[name])
    for one in objects:
        if one["kind"] == "CustomResourceDefinition":
            one["spec"] = "as crds/polyrljobs.yaml"
    text = yaml.safe_dump_all(objects, sort_keys=True, width=120)
    file = HERE / f"snapshots/{name}.yaml"
    if os.environ.get("POLYRL_UPDATE_SNAPSHOTS"):
        file.write_text(text)
    assert file.read_text() == text, "read the difference; POLYRL_UPDATE_SNAPSHOTS=1 takes it over"


def test_the_crd_of_the_chart_is_ours(render: Any) -> None:
    ours = (ROOT / "crds/polyrljobs.yaml").read_text()
    assert (CHART / "files/polyrljobs.yaml").read_text() == ours, "run `make crds`"
    (crd,) = (one for one in render({}) if one["kind"] == "CustomResourceDefinition")
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert _numbers(crd["spec"]) == _numbers(yaml.safe_load(ours)["spec"])


def _numbers(node: Any) -> Any:
    """Helm writes 1e-06, which YAML 1.1 reads as text and Kubernetes as a number."""
    if isinstance(node, dict):
        return {key: _numbers(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_numbers(value) for value in node]
    try:
        return float(node) if isinstance(node, str) and "e-" in node else node
    except ValueError:
        return node


def test_an_old_cluster_is_refused(helm: Any) -> None:
    answer = helm("template", "polyrl", CHART, "--kube-version", "1.28.0")
    assert answer.returncode != 0
    assert "1.30" in answer.stderr


def test_without_images_it_refuses_in_one_sentence_that_says_how_to_make_them(helm: Any) -> None:
    answer = helm("template", "polyrl", CHART, "--kube-version", "1.36.3")
    assert answer.returncode != 0
    assert "images.operator: no image is given and PolyRL publishes none" in answer.stderr
    assert "make images REGISTRY=" in answer.stderr
    each = [f"--set=images.{role}=example.org/{role}:1" for role in ("operator", "manager", "trainer", "rollout")]
    assert helm("template", "polyrl", CHART, "--kube-version", "1.36.3", *each).returncode == 0


@pytest.mark.parametrize("secure", [True, False])
def test_metrics_are_for_those_who_may_read_them_and_all_parts_know_it(render: Any, secure: bool) -> None:
    prometheus = {"name": "prometheus", "namespace": "monitoring"}
    rendered = render({"metrics": {"secure": secure, "readers": [prometheus], "monitors": {"enabled": True}}})
    objects = {one["kind"]: one for one in rendered}
    arguments = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert ("--no-metrics-secure" in arguments) is not secure
    (endpoint,) = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint.get("scheme") == "https") is ("bearerTokenFile" in endpoint) is secure
    assert ("401" in objects["Pod"]["spec"]["containers"][0]["args"]) is secure
    granted = [rule for one in rendered if one["kind"] == "ClusterRole" for rule in one["rules"]]
    assert any(rule.get("nonResourceURLs") == ["/metrics"] for rule in granted) is secure
    assert any("tokenreviews" in rule.get("resources", ()) for rule in granted) is secure
    bound = [one["subjects"] for one in rendered if one["kind"] == "ClusterRoleBinding"]
    assert ([{"kind": "ServiceAccount", **prometheus}] in bound) is secure


def test_pull_secrets_reach_the_operator_and_by_it_the_jobs(render: Any) -> None:
    (deployment,) = (one for one in render(VALUES["all-on"]) if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert "--image-pull-secret=registry" in pod["containers"][0]["args"]


def test_notes_name_the_images(helm: Any) -> None:
    answer = helm("install", "polyrl", CHART, "--dry-run=client", IMAGES, "--set=images.pullSecrets[0].name=mine")
    assert "Nobody publishes these images" in answer.stdout, answer.stderr
    assert "registry.example.org/polyrl/trainer:0.1.0 and" in answer.stdout
    assert "They are pulled with mine, Secrets that" in answer.stdout


def test_names_stay_within_a_label(helm: Any) -> None:
    answer = helm("template", "r" * 53, CHART, "--kube-version", "1.36.3", IMAGES)
    objects = [one for one in yaml.safe_load_all(answer.stdout) if one]
    named = [one["metadata"]["name"] for one in objects if one["kind"] in ("Service", "Deployment", "Pod", "Role")]
    assert named
    assert all(len(name) <= 63 for name in named)


def test_alerts_and_dashboard_read_metrics_that_there_are() -> None:
    folders = ("operator/polyrl_operator", "rollout/polyrl_rollout/manager")
    code = "".join(file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    made = set(re.findall(r'"(polyrl_[a-z_]+)"', code))
    for file in ("alerts.yaml", "dashboard.json"):
        read = set(
            re.findall(r"\b(polyrl_[a-z_]+?)(?:_total|_bucket)?\b(?=[^\"a-z_]|$)", (CHART / "files" / file).read_text())
        )
        assert read, file
        assert read <= made, file


def test_options_of_monitoring_render(render: Any) -> None:
    rendered = render(VALUES["all-on"])
    objects = {one["kind"]: one for one in rendered}
    assert objects["ServiceMonitor"]["spec"]["endpoints"][0]["port"] == "metrics"
    assert objects["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    assert objects["PodMonitor"]["spec"]["selector"]["matchLabels"] == {"polyrl.dev/role": "manager"}
    arguments = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--manager-metrics-port=9090" in arguments
    assert {alert["alert"] for group in objects["PrometheusRule"]["spec"]["groups"] for alert in group["rules"]}
    dashboards = [one for one in render(VALUES["all-on"]) if one["kind"] == "ConfigMap"]
    assert json.loads(dashboards[0]["data"]["polyrl.json"])["title"] == "PolyRL"
