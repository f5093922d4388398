"""`kubectl`, `helm` and other programs from PATH, each call with a deadline.

Nothing is retried: what may come late is awaited by name (`eventually`), what fails, fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.port import BedFailed

T = TypeVar("T")
CALL_S: Final = 60.0
"""One call of kubectl on two busy cores takes a second; a minute is a hang."""
POLL_S: Final = 0.5
"""Between two looks at what has no event to wait for."""


def call(*argv: str, timeout_s: float = CALL_S, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
    """stdout of a program. Raises BedFailed with what it said on stderr, or at the deadline."""
    env = {**os.environ} | ({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})
    try:
        done = subprocess.run(
            argv, input=stdin, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise BedFailed(f"{argv[0]} is not in PATH") from None
    except subprocess.TimeoutExpired:
        raise BedFailed(f"{' '.join(argv)}: no end within {timeout_s:g} s") from None
    if done.returncode:
        raise BedFailed(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()[-2000:]}{done.stdout[-2000:]}")
    return done.stdout


def eventually(what: str, probe: Callable[[], T], timeout_s: float, poll_s: float = POLL_S) -> T:
    """The first true answer of `probe`. Raises AssertionError at the deadline, naming what was awaited and what is."""
    end = time.monotonic() + timeout_s
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; last seen: {answer!r}")
        time.sleep(poll_s)


class Kubectl:
    """kubectl on one cluster and namespace."""

    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace

    def __call__(self, *args: str, timeout_s: float = CALL_S, stdin: str | None = None) -> str:
        argv = ("kubectl", "-n", self.namespace, f"--request-timeout={timeout_s:g}s", *args)
        return call(*argv, timeout_s=timeout_s + 5, stdin=stdin, kubeconfig=self.kubeconfig)

    def json(self, *args: str) -> dict[str, Any]:
        """One object, or a list of them under `items`."""
        answer: dict[str, Any] = json.loads(self("get", *args, "-o", "json"))
        return answer

    def items(self, *args: str) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.json(*args)["items"]
        return answer

    def answers(self) -> bool:
        """Whether the API server is there."""
        try:
            return self("get", "--raw", "/readyz", timeout_s=5) == "ok"
        except BedFailed:
            return False

    def node_ready(self, name: str) -> str:
        """`True`, `False`, `Unknown`, or `` for a node that is not known."""
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self("get", "node", name, "--ignore-not-found", "-o", path).strip()
