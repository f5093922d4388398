"""What a run kept, read from its own volumes by a pod of the operator's image once it is over.

The journal holds each sample's whole life, so that nothing here is taken from what the run says of itself.
Refuses to be called while the job runs: its volumes belong to its pods. Read next: `read_journal`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from cluster.tools import Kubectl
from on_cluster.settings import image

SCRIPT: Final = Path(__file__).with_name("read_journal.py")
AUDIT_S: Final = 120.0
Report = dict[str, Any]


def read_report(kubectl: Kubectl, job: str) -> Report:
    """Verdicts, counts, times, and the trainer's result."""
    name = f"{job}-audit"
    kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(_pod(job, name)))
    done = ("--for=jsonpath={.status.phase}=Succeeded", f"--timeout={AUDIT_S:g}s")
    try:
        kubectl("wait", f"pod/{name}", *done, timeout_s=AUDIT_S)
        report: Report = json.loads(kubectl("logs", name).strip().splitlines()[-1])
    finally:
        kubectl("delete", "pod", name, "--wait=false")
    return report


def assert_nothing_lost(report: Report) -> None:
    """No invariant broken; each submitted sample ended acknowledged or discarded for a reason, once."""
    assert not [v for v in report["verdicts"] if v["broken"]], report["verdicts"]
    samples = report["samples"]
    assert samples["submitted"] > 0
    assert not samples["twice"], samples
    assert samples["submitted"] == samples["acknowledged"] + sum(samples["discarded"].values()), samples


def _pod(job: str, name: str) -> dict[str, Any]:
    volumes = {"journal": f"{job}-manager", "run": f"{job}-trainer"}
    security = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
    container = {
        "name": "audit",
        "image": image("operator"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", SCRIPT.read_text()],
        "volumeMounts": [{"name": v, "mountPath": f"/polyrl/{v}"} for v in volumes],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": security | {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": v, "persistentVolumeClaim": {"claimName": c}} for v, c in volumes.items()],
        },
    }
