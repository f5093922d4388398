"""What the pages show in `sh cluster` blocks, run on a cluster as a reader would: one page, one script, in order.

docs/how-to/install-on-a-cluster.md    with a values file that names this checkout's images
docs/how-to/run-on-a-cluster.md        in a namespace of its own
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from cluster.port import Cluster
from cluster.tools import Kubectl, call
from on_cluster import release
from on_cluster.settings import OPERATOR_NAMESPACE, RELEASE, ROLES, ROOT, image

BLOCK = re.compile(r"^```sh cluster\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGE_S = 480.0
"""Install, upgrade and rollback wait for a pod each; a run needs a trainer that starts."""


def script(page: str) -> str:
    found = BLOCK.findall((ROOT / page).read_text())
    assert found, page
    return "".join(found)


def run(commands: str, folder: Path, kubeconfig: Path) -> None:
    """Raises AssertionError with what the script said."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig)}
    argv = ["bash", "-euxo", "pipefail", "-c", commands]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=PAGE_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


def checkout(folder: Path) -> Path:
    """A place with the repository's folders in it, where files may be written."""
    for name in ("charts", "examples", "crds"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_install_upgrade_rollback_uninstall(bed: Cluster, tmp_path: Path) -> None:
    assert (RELEASE, OPERATOR_NAMESPACE) == ("polyrl", "polyrl-system"), "the page names them"
    if Kubectl(bed.kubeconfig, OPERATOR_NAMESPACE)("get", "deployments", "-o", "name"):
        release.uninstall(bed.kubeconfig)
    values = {"images": {role: image(role) for role in ROLES}}
    (checkout(tmp_path) / "my-values.yaml").write_text(yaml.safe_dump(values))
    run(script("docs/how-to/install-on-a-cluster.md"), tmp_path, bed.kubeconfig)


def test_run_scale_suspend_delete(kubectl: Kubectl, operator: None, tmp_path: Path) -> None:
    mine = tmp_path / "kubeconfig"
    mine.write_text(kubectl.kubeconfig.read_text())
    mine.chmod(0o600)
    call("kubectl", "config", "set-context", "--current", f"--namespace={kubectl.namespace}", kubeconfig=mine)
    run(script("docs/how-to/run-on-a-cluster.md"), checkout(tmp_path), mine)
    assert not kubectl.items("polyrljobs")
