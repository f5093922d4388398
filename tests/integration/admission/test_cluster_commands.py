"""`polyrl run --on kubernetes`, `status` and `logs` against a real API server; the test plays the operator."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).parents[3] / "examples/sort-digits"
STEP_S = 120
"""Longest wait for one line; a command starts in about a second, and in twenty on crowded cores."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example, with its code in a ConfigMap, under a name of its own."""
    for file in EXAMPLE.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = yaml.safe_load((tmp_path / "job.yaml").read_text())
    manifest["metadata"]["name"] = f"job-{uuid.uuid4().hex[:8]}"
    manifest["spec"]["recipe"]["code"] = {"configMap": f"code-{uuid.uuid4().hex[:8]}"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    return tmp_path


def name_of(folder: Path) -> str:
    name: str = yaml.safe_load((folder / "job.yaml").read_text())["metadata"]["name"]
    return name


def named_by(job: dict[str, Any]) -> set[str]:
    """Data files."""
    return {rows["path"] for stage in ("sft", "rl", "eval") for rows in job["spec"]["recipe"]["data"][stage]}


def polyrl(server: Any, *args: str | Path, user: str = "admin") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polyrl_cli.app", *args, "--kubeconfig", server.kubeconfig(user)]
    return subprocess.run(command, capture_output=True, text=True, timeout=STEP_S * 2)


class Running:
    """A command that runs on while its lines are read."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def await_line(self, part: str) -> str:
        assert self.process.stdout is not None
        watchdog = threading.Timer(STEP_S, self.process.kill)
        watchdog.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line)
                if part in line:
                    return line
        finally:
            watchdog.cancel()
        raise AssertionError(f"no line with {part!r}, but {''.join(self.lines)}")

    def end(self) -> int:
        rest, _ = self.process.communicate(timeout=STEP_S)
        self.lines.append(rest)
        return self.process.returncode


def handle_interrupts() -> None:
    """A shell has its background jobs ignore interrupts, and all that they start with them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def running(server: Any, *args: str | Path) -> Iterator[Running]:
    command = [sys.executable, "-u", "-m", "polyrl_cli.app", *args, "--kubeconfig", server.kubeconfig()]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, preexec_fn=handle_interrupts, **output) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def path_of(name: str, namespace: str = "default") -> str:
    return f"/apis/polyrl.dev/v1alpha1/namespaces/{namespace}/polyrljobs/{name}"


def report(server: Any, name: str, **status: Any) -> None:
    change = {"status": {"observedGeneration": 1, **status}}
    answer = server.request("PATCH", f"{path_of(name)}/status", change, content="application/merge-patch+json")
    assert answer[0] == 200, answer


def condition(kind: str, status: str = "True", message: str = "") -> dict[str, Any]:
    timestamp = "2026-01-01T00:00:00Z"
    return {"type": kind, "status": status, "reason": kind, "message": message, "lastTransitionTime": timestamp,
            "observedGeneration": 1}  # fmt: skip


def record_event(server: Any, name: str, uid: str, note: str) -> None:
    regarding = {
        "apiVersion": "polyrl.dev/v1alpha1",
        "kind": "PolyRLJob",
        "name": name,
        "namespace": "default",
        "uid": uid,
    }
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{uuid.uuid4().hex[:8]}", "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "polyrl.dev/operator",
        "reportingInstance": "tests",
        "action": "RolloutCreated",
        "reason": "RolloutCreated",
        "type": "Normal",
        "note": note,
        "regarding": regarding,
    }
    answer = server.request("POST", "/apis/events.k8s.io/v1/namespaces/default/events", event)
    assert answer[0] == 201, answer


def test_a_run_is_applied_followed_and_ends_as_the_job_does(server: Any, folder: Path) -> None:
    name = name_of(folder)
    with running(server, "run", "--on", "kubernetes", folder / "job.yaml") as command:
        command.await_line(f"{name} is made in namespace default")
        _, job = server.request("GET", path_of(name))
        code = job["spec"]["recipe"]["code"]["configMap"]
        _, files = server.request("GET", f"/api/v1/namespaces/default/configmaps/{code}")
        assert files["data"].keys() == {"reward.py", "make_data.py", "rl.jsonl", "eval.jsonl"}
        assert files["binaryData"].keys() == {"sft.jsonl.gz"}
        assert {one["manager"] for one in job["metadata"]["managedFields"]} == {"polyrl"}
        record_event(server, name, job["metadata"]["uid"], "created 2 pods")
        command.await_line("RolloutCreated: created 2 pods")
        report(server, name, state="Running", manager={"step": 3})
        command.await_line("Running, RL step 3 of 120")
        report(server, name, state="Complete", conditions=[condition("Complete")])
        assert command.end() == 0
    assert "Complete" in command.lines[-1]


def test_a_failed_job_ends_in_one_with_its_reason(server: Any, folder: Path) -> None:
    name = name_of(folder)
    with running(server, "run", "--on", "kubernetes", folder / "job.yaml") as command:
        command.await_line("is made")
        failure = {"reason": "TrainerFailed", "message": "no memory", "exitCode": 137}
        report(server, name, state="Failed", conditions=[condition("Failed")], failure=failure)
        assert command.end() == 1
    assert "TrainerFailed, exit status 137: no memory" in command.lines[-1]


def test_a_job_that_is_not_accepted_is_the_users_to_mend(server: Any, folder: Path) -> None:
    with running(server, "run", "--on", "kubernetes", folder / "job.yaml") as command:
        command.await_line("is made")
        report(server, name_of(folder), conditions=[condition("Accepted", "False", "spec.trainer.replicas: 2 ranks")])
        assert command.end() == 2
    assert "is not accepted: spec.trainer.replicas: 2 ranks" in command.lines[-1]


def test_a_job_that_is_deleted_meanwhile_ends_the_watch(server: Any, folder: Path) -> None:
    with running(server, "run", "--on", "kubernetes", folder / "job.yaml") as command:
        command.await_line("is made")
        server.request("DELETE", path_of(name_of(folder)))
        assert command.end() == 1
    assert "was deleted" in command.lines[-1]


def test_interrupting_leaves_the_job(server: Any, folder: Path) -> None:
    with running(server, "run", "--on", "kubernetes", folder / "job.yaml") as command:
        command.await_line("is made")
        command.process.send_signal(signal.SIGINT)
        assert command.end() == 130
    assert "the job goes on" in command.lines[-1]
    assert server.request("GET", path_of(name_of(folder)))[0] == 200


def test_a_job_that_is_over_is_not_run_again(server: Any, folder: Path) -> None:
    server.kubectl("apply", "-f", folder / "job.yaml")
    report(server, name_of(folder), state="Complete", conditions=[condition("Complete")])
    answer = polyrl(server, "run", "--on", "kubernetes", folder / "job.yaml")
    assert answer.returncode == 2
    assert "is Complete already; delete it" in answer.stderr


def test_status_shows_the_whole_job(server: Any, folder: Path) -> None:
    name = name_of(folder)
    server.kubectl("apply", "-f", folder / "job.yaml")
    assert "no operator has handled it yet" in polyrl(server, "status", name).stdout
    report(server, name, state="Running", rollout={"registeredReplicas": 1, "desiredReplicas": 2}, manager={"step": 7})
    answer = polyrl(server, "status", name)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[0] == f"{name}: Running, RL step 7 of 120, 1 of 2 rollouts"


REFUSED: list[tuple[list[str], str, str]] = [
    (["status", "nobody"], "admin", "there is no PolyRLJob nobody in namespace default"),
    (["status", "nobody", "-n", "elsewhere"], "admin", "in namespace elsewhere"),
    (["status", "nobody"], "stranger", 'User "stranger" cannot get resource "polyrljobs"'),
    (["status", "nobody"], "nobody", "does not know you"),
    (["logs", "nobody"], "admin", "there is no PolyRLJob nobody"),
    (["status", "nobody", "--context", "other"], "admin", "the kubeconfig has only bare"),
]


@pytest.mark.parametrize(("args", "user", "words"), REFUSED, ids=lambda given: str(given))
def test_a_refusal_is_one_sentence(server: Any, args: list[str], user: str, words: str) -> None:
    answer = polyrl(server, *args, user=user)
    assert answer.returncode == 2
    assert words in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_the_admission_of_the_server_reaches_the_user(server: Any, folder: Path) -> None:
    name = name_of(folder)
    server.kubectl("apply", "-f", folder / "job.yaml")
    answer = polyrl(server, "run", "--on", "kubernetes", folder / "job.yaml", "--seed", "1")
    assert answer.returncode == 2
    assert "spec.recipe.seed" in answer.stderr
    assert name in answer.stderr


def test_no_cluster_is_reported_in_one_sentence(tmp_path: Path) -> None:
    config = {"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}], "current-context": "c",
              "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
              "users": [{"name": "u", "user": {}}], "apiVersion": "v1", "kind": "Config"}  # fmt: skip
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    for kubeconfig, words in (
        (file, "no cluster answers at https://127.0.0.1:1"),
        (tmp_path / "no", "no way to reach"),
    ):
        command = [sys.executable, "-m", "polyrl_cli.app", "status", "a", "--kubeconfig", kubeconfig]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S)
        assert answer.returncode == 2
        assert words in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("args", "words"), [
    (["--on", "kubernetes", "--out", "x"], "--out: only means something with --on here"),
    (["--namespace", "x"], "--namespace: only means something with --on kubernetes"),
])  # fmt: skip
def test_flags_of_the_other_place_are_refused(args: list[str], words: str) -> None:
    command = [sys.executable, "-m", "polyrl_cli.app", "run", EXAMPLE / "job.yaml", *args]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S)
    assert answer.returncode == 2
    assert words in answer.stderr
