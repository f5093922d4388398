"""The operator as it is deployed: its own process, kopf's watches, its ports, its signals."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyrl_operator.api.kinds import POD


async def test_a_job_lives_and_ends_and_nothing_is_left(place: Any, nodes: Any, start_operator: Any) -> None:
    async with start_operator() as operator:
        job = await place.submit()
        await place.rollouts(2)
        of_roles = {f"job-keys-{role}" for role in ("manager", "trainer", "reserved")}
        await place.until("every Secret", lambda: holds_secrets(place, {"job-keys", *of_roles, "job-r-1", "job-r-2"}))
        await place.state("Running", "Degraded", "Pending")
        await nodes.finish_trainer(place.namespace, "job")
        stored = await place.state("Complete")
        await place.until("rollouts go", lambda: gone(place, "rollout"))
        await place.until("the manager goes", lambda: gone(place, "manager"))
        conditions = {one["type"]: one["status"] for one in stored["status"]["conditions"]}
        assert conditions["Complete"] == "True"
        assert stored["spec"] == job["spec"], "the operator never writes spec"
        assert "finalizers" not in stored["metadata"]
        assert "annotations" not in stored["metadata"]
        assert await operator.end() == 0
        assert not [line for line in operator.lines if line["event"] == "not JSON"]
        assert not [line for line in operator.lines if line.get("level") in ("error", "critical")]
    owners = {manager["manager"] for manager in stored["metadata"]["managedFields"]}
    assert owners == {"test", "polyrl-operator"}


async def holds_secrets(place: Any, names: set[str]) -> bool:
    return {name for kind, name in await place.children() if kind == "Secret"} == names


async def gone(place: Any, role: str) -> bool:
    return not await place.pods(role)


@pytest.fixture
def core_dumps() -> Iterator[None]:
    """Allowed here, and so in what is started, as far as this machine lets us."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.usefixtures("core_dumps")
async def test_it_shows_health_metrics_and_events(place: Any, nodes: Any, start_operator: Any) -> None:
    async with start_operator() as operator:
        await place.submit()
        await place.rollouts(2)
        assert await operator.get("/healthz") == (200, "ok\n")
        assert (await operator.get("/readyz"))[0] == 200
        # Pods may run before the turn that made them is over: what it shows and tells comes at its end.
        desired = f'polyrl_rollout_desired_replicas{{job="job",namespace="{place.namespace}"}} 2.0'
        text = await place.until("the job's numbers are shown", lambda: shown(operator, desired))
        assert "polyrl_reconcile_seconds_bucket" in text
        assert 'polyrl_api_requests_total{code="2xx",resource="pods",verb="create"}' in text
        assert "job-r-1" not in text, "no pod is a label"
        assert core_dump_limit(operator.process.pid) == "0", "it knows every manager's token"
        await place.until("events are recorded", lambda: events_recorded(place, {"Accepted", "RolloutCreated"}))


def core_dump_limit(pid: int) -> str:
    return str(re.findall(r"^Max core file size +(\S+) ", Path(f"/proc/{pid}/limits").read_text(), re.MULTILINE)[0])


async def shown(operator: Any, line: str) -> str:
    """All metrics, once that line is among them."""
    status, text = await operator.get("/metrics")
    assert status == 200
    return text if line in text else ""


async def events_recorded(place: Any, reasons: set[str]) -> bool:
    path = f"/apis/events.k8s.io/v1/namespaces/{place.namespace}/events"
    return reasons <= {event["reason"] for event in place.server.request("GET", path)[1]["items"]}


async def test_flags_are_checked_with_a_sentence(place: Any) -> None:
    command = [sys.executable, "-m", "polyrl_operator"]
    command += ["--manager-image=m", "--trainer-image=t", "--rollout-image=r"]
    for flags, words in (([], "--all-namespaces"), (["--all-namespaces", "--log-level=loud"], "loud")):
        process = await asyncio.create_subprocess_exec(*command, *flags, stderr=asyncio.subprocess.PIPE)
        _, stderr = await process.communicate()
        assert process.returncode == 2
        assert words in stderr.decode()
        assert "Traceback" not in stderr.decode()


async def test_a_second_replica_stands_by_and_takes_over(place: Any, nodes: Any, start_operator: Any) -> None:
    async with start_operator(name="first") as first:
        await place.submit()
        await place.rollouts(2)
        async with start_operator(name="second") as second:
            await second.port_of("/readyz")
            await place.until("the standby is ready", lambda: ready(second))
            assert not second.logged("action")
            await first.end(signal.SIGKILL)
            killed_at = time.monotonic()
            pod = (await place.rollouts(2))[0]["metadata"]
            await place.client.delete(POD, place.namespace, pod["name"], pod["uid"])
            pods = await place.until("the lost rollout is replaced", lambda: replaced(place, pod["name"]))
            print(f"replaced {time.monotonic() - killed_at:.1f} s after the leader was killed")
            assert {one["metadata"]["name"] for one in pods} == {"job-r-2", "job-r-3"} or pod["name"] == "job-r-2"
            created = [line["action"] for line in second.logged("action") if "create Pod" in line["action"]]
            assert len(created) == 1, created


async def ready(process: Any) -> bool:
    return (await process.get("/readyz"))[0] == 200


async def replaced(place: Any, lost: str) -> list[dict[str, Any]]:
    pods = [pod for pod in await place.pods("rollout") if not pod["metadata"].get("deletionTimestamp")]
    running = [pod for pod in pods if pod["status"].get("phase") == "Running" and pod["metadata"]["name"] != lost]
    return running if len(running) == 2 else []
