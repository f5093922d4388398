"""The bed's own promises: which cluster is chosen, what an external driver's exit codes mean, what a guest refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cluster import port
from cluster.choice import DRIVER, KUBECONFIG, choose_cluster
from cluster.external_driver import ExternalCluster
from cluster.given_driver import GivenCluster
from cluster.kind_driver import KindCluster

ROOT = Path(__file__).parents[3]

SCRIPT = """#!/bin/sh
echo "$@" >> {log}
case $1 in
  kubeconfig) echo {folder}/config;;
  kill-process) echo 2;;
  freeze) echo "no such thing here" >&2; exit 3;;
  add-node) echo "no machine left" >&2; exit 1;;
esac
"""
DOCKER = """#!/bin/sh
echo "$1 $*" | grep -o '^build\\|[a-z]*/[a-z]*:[^ ]*' | paste -sd' ' >> {log}
case "$*" in {fails}) exit 1;; esac
"""
"""Notes which image it is asked about or builds, and fails for what matches."""
REFUSED = (
    lambda c: c.load_image(["a:1"]),
    lambda c: c.add_node("n", "spot"),
    lambda c: c.kill_node("n"),
    lambda c: c.remove_node("n"),
    lambda c: c.freeze("n"),
    lambda c: c.thaw("n"),
    lambda c: c.stop_api(),
    lambda c: c.start_api(),
    lambda c: c.restart_etcd(),
    lambda c: c.kill_process("n", "uid", "x"),
)


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "driver"
    path.write_text(SCRIPT.format(log=tmp_path / "log", folder=tmp_path))
    path.chmod(0o755)
    return path


def test_the_environment_chooses(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv(DRIVER, raising=False)
    assert isinstance(choose_cluster(), KindCluster)
    monkeypatch.setenv("KUBECONFIG", str(KUBECONFIG))
    assert isinstance(choose_cluster(), KindCluster), "that file is our own kind cluster's"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "theirs"))
    assert isinstance(choose_cluster(), GivenCluster)
    monkeypatch.setenv(DRIVER, str(driver))
    assert isinstance(choose_cluster(), ExternalCluster)


def test_an_external_driver_gets_the_ports_verbs(driver: Path, tmp_path: Path) -> None:
    cluster = ExternalCluster(str(driver))
    assert cluster.kubeconfig == tmp_path / "config"
    cluster.kill_node("n1")
    cluster.load_image(["a:1", "b:2"])
    assert cluster.kill_process("n1", "uid", "python -m x") == 2
    output = (tmp_path / "log").read_text().splitlines()
    assert output == ["kubeconfig", "kill-node n1", "load-image a:1 b:2", "kill-process n1 uid python -m x"]


def test_its_exit_codes_tell_cannot_from_failed(driver: Path) -> None:
    cluster = ExternalCluster(str(driver))
    with pytest.raises(port.Unsupported, match="no such thing here"):
        cluster.freeze("n1")
    with pytest.raises(port.BedFailed, match="no machine left"):
        cluster.add_node("n1", "spot")


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_guest_touches_no_machine(number: int, tmp_path: Path) -> None:
    with pytest.raises(port.Unsupported, match="is not ours"):
        REFUSED[number](GivenCluster(tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("fails", "tag", "built"),
    [
        pytest.param("none", "", [], id="all are there, under the tag that names what lies in them"),
        pytest.param(
            "none", "TAG=1", ["operator", "manager", "rollout", "trainer"], id="a tag that was given says nothing"
        ),
        pytest.param("image*", "", ["operator", "manager", "rollout", "trainer"], id="none is there"),
        pytest.param("*manager*", "", ["manager"], id="one cannot be built"),
    ],
)
def test_images_are_built_where_they_are_missing(fails: str, tag: str, built: list[str], tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(DOCKER.format(log=tmp_path / "log", fails=fails))
    docker.chmod(0o755)
    named = ("TAG", "REGISTRY", "VARIANT", "BASE", "POLYRL_CLUSTER_PREFIX", "MAKEFLAGS", "MAKELEVEL")
    inherited = {key: value for key, value in os.environ.items() if key not in named}
    environment = {**inherited, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "images", "REGISTRY=test", *tag.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode != 0) == (fails == "*manager*"), "a build that fails is not passed over"
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [one[1].split("/")[1].split(":")[0] for one in lines if one[0] == "build"] == built
