"""`polyrl` as a user runs it on a cluster: in a process, with the kubeconfig of the bed."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from cluster.tools import Kubectl

COMMAND_S: Final = 90.0
"""A command that starts a pod, or an interpreter in a container, on two busy cores."""


def polyrl(kubectl: Kubectl, *words: str) -> subprocess.CompletedProcess[str]:
    """The ended process; what it printed is printed as well."""
    place = ("-n", kubectl.namespace, "--kubeconfig", str(kubectl.kubeconfig))
    command = [sys.executable, "-m", "polyrl_cli.app", *words, *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    print(f"polyrl {' '.join(words)}: {done.stdout}{done.stderr}".rstrip())
    return done


def printed_by(kubectl: Kubectl, *words: str) -> str:
    """What it printed. Raises AssertionError unless it ended well."""
    done = polyrl(kubectl, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout
