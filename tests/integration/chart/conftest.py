"""The chart as the real Helm renders it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

CHART: Final = Path(__file__).parents[3] / "charts/polyrl"
KUBERNETES: Final = "1.36.3"
"""Rendered for; without a cluster Helm assumes a version of its own."""

IMAGES: Final = "--set=images.prefix=registry.example.org/polyrl/"

Helm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def helm(helm_program: str) -> Helm:
    """Runs the real Helm without a cluster."""

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([helm_program, *args], capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture(scope="session")
def template(helm: Helm) -> Callable[[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """`helm template` of a release `polyrl` in namespace polyrl-system with these values."""

    def run(values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        given = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
        return helm("template", "polyrl", CHART, "-n", "polyrl-system", "--kube-version", KUBERNETES, IMAGES, *given)

    return run


@pytest.fixture(scope="session")
def render(template: Any) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """The objects that these values make."""

    def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
        answer = template(values)
        assert answer.returncode == 0, answer.stderr
        return [one for one in yaml.safe_load_all(answer.stdout) if one]

    return rendered
