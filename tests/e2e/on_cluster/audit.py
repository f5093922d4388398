"""What a run kept, read from its own volumes by a pod of the operator's image once it is over.

The journal holds each sample's whole life, so that nothing here is taken from what the run says of itself.
Only when the job has ended: until then its volumes belong to its pods.
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


def read_report(kubectl: Kubectl, job: str, claim: str = "") -> Report:
    """Verdicts, counts, times, and the trainer's result; `claim` is the user's own that the trainer had, if it did."""
    name = f"{job}-audit"
    run = {"name": "run", "mountPath": "/polyrl/run"}
    if claim:
        run["subPath"] = kubectl.json("polyrljob", job)["metadata"]["uid"]
    pod = _pod(name, run, {"journal": f"{job}-manager", "run": claim or f"{job}-trainer"})
    kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(pod))
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


def _pod(name: str, run: dict[str, str], volumes: dict[str, str]) -> dict[str, Any]:
    security = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
    container = {
        "name": "audit",
        "image": image("operator"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", SCRIPT.read_text()],
        "volumeMounts": [{"name": "journal", "mountPath": "/polyrl/journal"}, run],
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
