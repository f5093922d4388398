"""The images alone, as plain pods: what is in them, who they run as, and how they end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster.tools import Kubectl
from on_cluster.settings import ROLES, image

LOADS = {
    "operator": "import polyrl_cli.app, kopf, kubernetes.aio",
    "manager": "import polyrl_rollout.manager.__main__",
    "trainer": "import polyrl_trainer.app, torch, pyarrow, torch.utils.tensorboard, wandb, mlflow",
    "rollout": "import polyrl_rollout.agent.__main__, polyrl_rollout.engines.embedded.process",
}
LACKS = {
    "operator": ("torch", "transformers"),
    "manager": ("torch", "transformers"),
    "trainer": (),
    "rollout": ("pyarrow",),
}
IMPORTS = """
import importlib.util, json, os, pathlib, shutil, sys
{loads}
def writable(path):
    try:
        pathlib.Path(path, "probe").touch()
        return True
    except OSError:
        return False
print(json.dumps({{
    "uid": os.getuid(), "safe_path": sys.flags.safe_path, "home": os.environ["HOME"],
    "root_writable": writable("/") or writable("/opt/polyrl"), "tmp_writable": writable("/tmp"),
    "tools": [t for t in ("gcc", "cc", "uv", "git", "make") if shutil.which(t)],
    "present": [m for m in {lacks!r} if importlib.util.find_spec(m)],
}}))
"""


def pod(name: str, role: str, command: list[str]) -> dict[str, Any]:
    """A pod as the operator makes them: restricted, read-only but for /tmp."""
    container = {
        "name": "main",
        "image": image(role),
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    # No user is named: the images' own must do under `runAsNonRoot`, which judges numbers only.
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "securityContext": security}
    spec |= {"containers": [container], "volumes": [{"name": "tmp", "emptyDir": {}}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize("role", ROLES)
def test_an_image_holds_what_its_component_needs_and_runs_as_nobody(role: str, kubectl: Kubectl) -> None:
    script = IMPORTS.format(loads=LOADS[role], lacks=LACKS[role])
    kubectl("apply", "-f", "-", stdin=json.dumps(pod(role, role, ["python", "-c", script])))
    kubectl("wait", f"pod/{role}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s", timeout_s=120)
    seen = json.loads(kubectl("logs", role).strip().splitlines()[-1])
    assert seen == {
        "uid": 10001,
        "safe_path": True,
        "home": "/tmp",
        "root_writable": False,
        "tmp_writable": True,
        "tools": [],
        "present": [],
    }
