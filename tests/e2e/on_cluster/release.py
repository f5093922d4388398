"""The chart as a release: installed by the real Helm with this checkout's images, and gone again."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cluster.tools import call
from on_cluster.settings import OPERATOR_NAMESPACE, RELEASE, ROLES, ROOT, image

HELM_S: Final = 240.0
WAIT: Final = "180s"


def install(kubeconfig: Path, *values: str) -> None:
    """Installs or upgrades; returns once the operator is ready."""
    given = [part for role in ROLES for part in ("--set", f"images.{role}={image(role)}")]
    more = [part for value in values for part in ("--set", value)]
    place = ("--namespace", OPERATOR_NAMESPACE, "--create-namespace")
    argv = ("helm", "upgrade", "--install", RELEASE, str(ROOT / "charts/polyrl"), *place, *given, *more)
    call(*argv, "--wait", "--timeout", WAIT, timeout_s=HELM_S, kubeconfig=kubeconfig)


def uninstall(kubeconfig: Path) -> None:
    """Takes the release away, and waits until its pods are gone."""
    argv = ("helm", "uninstall", RELEASE, "--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", WAIT)
    call(*argv, timeout_s=HELM_S, kubeconfig=kubeconfig)
