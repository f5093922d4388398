"""What `polyrl status` and `polyrl run --on kubernetes` tell of a job, from stored objects and events."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyrl.errors import UserError
from polyrl.manifest.job import PolyRLJob
from polyrl_cli.remote.logs import ContainerLog, containers_with_log
from polyrl_cli.remote.run import MAX_BYTES, JobLines, code_config_map
from polyrl_cli.remote.status import ended, headline, status_report

STATUS: dict[str, Any] = {
    "state": "Degraded",
    "manager": {"step": 41},
    "trainer": {"ready": 1, "replicas": 1, "restarts": 0, "disruptions": 2},
    "rollout": {
        "registeredReplicas": 2, "desiredReplicas": 3, "pendingReplicas": 1, "spotReplicas": 2, "onDemandReplicas": 1,
        "preemptions": 7, "failures": 0,
        "pools": [{"name": "spot", "state": "BackingOff", "backoffUntil": "2026-01-01T00:01:00Z", "lastReason": "no"}],
    },
    "scaling": {"lastReason": "3 rollouts: rollout 9.1 s, train 9.0 s"},
    "cost": {"reservedMicros": 2_000_000, "spotMicros": 500_000},
    "conditions": [
        {"type": "CapacityLimited", "status": "True", "reason": "SpotUnavailable", "message": "no spot for 5 min"},
        {"type": "TrainerReady", "status": "True", "reason": "Ready", "message": "fine"},
    ],
    "recentDisruptions": [
        {"podName": "a-r-4", "reason": "SpotInterruption", "noticeTime": "2026-01-01T00:00:00Z", "noticeMillis": 2500}
    ],
}  # fmt: skip


def raw(status: dict[str, Any] | None = None) -> dict[str, Any]:
    spec = {"recipe": {"mode": "rl", "algorithm": {"steps": 120}}, "pricing": {"currency": "EUR"}}
    made: dict[str, Any] = {"metadata": {"name": "a", "uid": "u", "generation": 1}, "spec": spec}
    return made if status is None else made | {"status": status}


def test_the_report_holds_what_matters() -> None:
    lines = status_report(raw(STATUS))
    assert lines[0] == "a: Degraded, RL step 41 of 120, 2 of 3 rollouts"
    reported = "\n".join(lines)
    for part in (
        "2 by the cluster's",
        "1 without a node",
        "7 taken away",
        "backs off until 2026-01-01T00:01:00Z",
        "rollout 9.1 s, train 9.0 s",
        "2.50 EUR (reserved 2.00, spot 0.50, on demand 0.00)",
        "CapacityLimited is True (SpotUnavailable): no spot for 5 min",
        "a-r-4 lost: SpotInterruption, 2.5 s notice",
    ):
        assert part in reported
    assert "TrainerReady" not in reported, "what goes well is not shown"


def test_a_job_that_no_operator_reconciles_says_so() -> None:
    assert status_report(raw()) == ["a: no operator has handled it yet"]


def test_a_failure_is_shown_with_its_exit_status() -> None:
    failed = {"state": "Failed", "failure": {"reason": "TrainerFailed", "message": "no memory", "exitCode": 137}}
    assert status_report(raw(failed))[-1].split() == [
        "failed",
        "TrainerFailed,",
        "exit",
        "status",
        "137:",
        "no",
        "memory",
    ]


def test_sft_has_no_rl_step() -> None:
    job = raw({"state": "Running"})
    job["spec"]["recipe"]["mode"] = "sft"
    assert headline(job) == "a: Running"


@pytest.mark.parametrize(("kind", "status", "over"), [
    ("Complete", "True", True), ("Failed", "True", True), ("Complete", "False", False), ("Suspended", "True", False),
])  # fmt: skip
def test_a_job_is_over_by_its_conditions(kind: str, status: str, over: bool) -> None:
    assert bool(ended(raw({"conditions": [{"type": kind, "status": status}]}))) is over


def event(uid: str, note: str, count: int = 1) -> dict[str, Any]:
    series = {"series": {"count": count}} if count > 1 else {}
    return {"metadata": {"uid": uid}, "reason": "RolloutPreempted", "note": note} | series


def test_each_event_is_shown_once_and_again_when_counted_up() -> None:
    lines_of_job = JobLines(began=100.0)
    assert lines_of_job.events("LIST", [event("1", "gone")], 101.0) == ["00:01  RolloutPreempted: gone"]
    assert lines_of_job.events("LIST", [event("1", "gone")], 102.0) == []
    assert lines_of_job.events("MODIFIED", [event("1", "gone", 3)], 163.0) == [
        "01:03  RolloutPreempted: gone (3 times)"
    ]
    assert lines_of_job.events("DELETED", [event("2", "old")], 164.0) == []


def test_events_of_an_earlier_watch_are_not_shown_again() -> None:
    lines_of_job = JobLines(began=0.0, quiet=True)
    assert lines_of_job.events("LIST", [event("1", "old")], 1.0) == []
    assert lines_of_job.events("ADDED", [event("2", "new")], 2.0) != []


def test_a_step_is_shown_every_few_seconds_at_most() -> None:
    lines_of_job, job = JobLines(began=0.0), raw(deepcopy(STATUS))
    assert len(lines_of_job.job(job, 1.0)) == 1
    job["status"]["manager"]["step"] = 42
    assert lines_of_job.job(job, 2.0) == []
    assert len(lines_of_job.job(job, 7.0)) == 1
    assert lines_of_job.job(job, 20.0) == [], "nothing new"


def test_containers_that_print_are_found_sidecars_too() -> None:
    pod = {
        "metadata": {"name": "p"},
        "status": {
            "initContainerStatuses": [{"name": "reserved", "state": {"running": {}}, "restartCount": 1}],
            "containerStatuses": [
                {"name": "trainer", "state": {"waiting": {}}},
                {"name": "x", "state": {"terminated": {}}},
            ],
        },
    }  # fmt: skip
    assert list(containers_with_log(pod)) == [
        ContainerLog("p", "reserved", restarts=1),
        ContainerLog("p", "x", restarts=0),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text("def score(sample): return 1.0\n")
    (tmp_path / "rl.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "notes.txt").write_text("not for the cluster")
    return tmp_path


def job(folder: Path, **recipe: Any) -> PolyRLJob:
    text = """
    apiVersion: polyrl.dev/v1alpha1
    kind: PolyRLJob
    metadata: {name: a}
    spec:
      recipe:
        code: {configMap: files}
        model: {path: /models/a}
        data: {rl: [{path: rl.jsonl}]}
        algorithm: {steps: 1}
        reward: {function: "reward:score"}
      rollout: {engine: {type: sglang}}
    """
    data = yaml.safe_load(text)
    data["spec"]["recipe"] |= recipe
    return PolyRLJob.model_validate(data)


def test_a_config_map_holds_what_the_manifest_names(folder: Path) -> None:
    made = code_config_map(job(folder), folder / "job.yaml", "ml")
    assert made is not None
    assert made["metadata"]["name"] == "files"
    assert made["data"].keys() == {"reward.py", "rl.jsonl"}


def test_bytes_that_are_no_text_go_as_bytes(folder: Path) -> None:
    (folder / "rl.parquet").write_bytes(b"PAR1\xff\xfe")
    made = code_config_map(job(folder, data={"rl": [{"path": "rl.parquet"}]}), folder / "job.yaml", "ml")
    assert made is not None
    assert made["binaryData"] == {"rl.parquet": "UEFSMf/+"}


def test_no_config_map_is_named_none_is_made(folder: Path) -> None:
    assert code_config_map(job(folder, code={}), folder / "job.yaml", "ml") is None


@pytest.mark.parametrize(("path", "words"), [
    ("sub/rl.jsonl", "spec.recipe.data.rl[0].path"), ("missing.jsonl", "spec.recipe.data.rl[0].path"),
])  # fmt: skip
def test_what_a_config_map_cannot_hold_is_refused_by_its_field(folder: Path, path: str, words: str) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/rl.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="volumeClaim") as refused:
        code_config_map(job(folder, data={"rl": [{"path": path}]}), folder / "job.yaml", "ml")
    assert words in str(refused.value)


def test_too_much_is_refused_naming_the_largest(folder: Path) -> None:
    (folder / "rl.jsonl").write_text("x" * MAX_BYTES)
    with pytest.raises(UserError, match=r"rl\.jsonl the most"):
        code_config_map(job(folder), folder / "job.yaml", "ml")
