"""`polyrl chaos --on kubernetes` against a real API server and its own rights; the test plays the kubelet.

What is to run in a container is run here, as a process, so all but the container is real.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from aiohttp import WSMsgType, web

from polyrl.partition_signals import HEAL, PARTITION
from polyrl_operator.secret import make_certificate

EXAMPLE = Path(__file__).parents[3] / "examples/sort-digits"
STEP_S = 120.0
POLL_S = 0.02
FREEZE_S = 15
"""Long enough to be seen when the command that began it has ended."""
ALL_TEST_S = 600
"""A fault that lasts longer than a test."""
RBAC = "/apis/rbac.authorization.k8s.io/v1"
PROTOCOL = "v4.channel.k8s.io"
READ_PODS = {"polyrl.dev": ("polyrljobs", ["get"]), "": ("pods", ["list"])}

WORKER = f"""
import signal, subprocess, sys
def show(number, _): print("got", number, flush=True)
for number in ({PARTITION:d}, {HEAL:d}): signal.signal(number, show)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
while True: signal.pause()
"""


class Kubelet:
    """Runs what it is asked to by exec, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str]] = []
        self.commands: list[asyncio.subprocess.Process] = []
        self.port = 0

    async def start(self) -> None:
        certificate = make_certificate(["kubelet"])
        (self.folder / "crt").write_bytes(certificate.certificate)
        (self.folder / "key").write_bytes(certificate.key)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.folder / "crt", self.folder / "key")
        app = web.Application()
        app.router.add_get("/exec/{namespace}/{pod}/{container}", self._exec)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        for command in self.commands:
            if command.returncode is None:
                # Else its keeper would go on by itself until the fault is over.
                with suppress(psutil.NoSuchProcess):
                    for keeper in psutil.Process(command.pid).children():
                        keeper.kill()
                command.kill()
            await command.wait()
        await self._runner.cleanup()

    async def _exec(self, request: web.Request) -> web.WebSocketResponse:
        self.asked.append((request.match_info["pod"], request.match_info["container"]))
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        process = await asyncio.create_subprocess_exec(
            *request.query.getall("command"),
            env=os.environ | {"TMPDIR": str(self.folder)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self.commands.append(process)
        assert process.stdout is not None
        assert process.stderr is not None
        if line := await process.stdout.readline():
            await socket.send_bytes(b"\x01" + line)
        else:
            await socket.send_bytes(b"\x02" + await process.stderr.read())
            await socket.send_bytes(b"\x03" + json.dumps({"status": "Failure", "message": "exit code 1"}).encode())
        async for message in socket:
            assert message.type is not WSMsgType.TEXT
        await process.wait()
        return socket


@dataclass
class Bed:
    """A job's pods on a node of ours."""

    server: Any
    kubelet: Kubelet
    namespace: str
    folder: Path
    job: str = "job"
    workers: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    engines: dict[str, psutil.Process] = field(default_factory=dict)

    def path(self, name: str = "", subresource: str = "") -> str:
        return "/".join(("/api/v1/namespaces", self.namespace, "pods", *(part for part in (name, subresource) if part)))

    def add_node(self) -> None:
        node = f"node-{self.namespace}"
        status, answer = self.server.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
        assert status == 201, answer
        address = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}
        port = {"daemonEndpoints": {"kubeletEndpoint": {"Port": self.kubelet.port}}}
        self._patch(f"/api/v1/nodes/{node}/status", {"status": address | port})

    def add_job(self) -> None:
        job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
        job["metadata"] = {"name": self.job}
        path = f"/apis/polyrl.dev/v1alpha1/namespaces/{self.namespace}/polyrljobs"
        status, answer = self.server.request("POST", path, job)
        assert status == 201, answer

    async def add_pod(self, name: str, role: str, *, alive: bool = True) -> None:
        argv = [sys.executable, "-c", f"{WORKER}# {uuid.uuid4().hex}", "further"]
        labels = {"polyrl.dev/job-name": self.job, "polyrl.dev/role": role}
        spec = {"nodeName": f"node-{self.namespace}", "containers": [{"name": role, "image": "i", "command": argv}]}
        pod = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        status, answer = self.server.request("POST", self.path(), pod)
        assert status == 201, answer
        state = {"running": {}} if alive else {"waiting": {"reason": "ImagePullBackOff"}}
        containers = [{"name": role, "state": state, "ready": alive, "restartCount": 0, "image": "i", "imageID": ""}]
        self._patch(self.path(name, "status"), {"status": {"phase": "Running", "containerStatuses": containers}})
        if alive:
            process = self.workers[name] = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
            self.engines[name] = psutil.Process(int(await self.output(name)))
            assert process.returncode is None

    async def output(self, name: str) -> str:
        stdout = self.workers[name].stdout
        assert stdout is not None
        return (await asyncio.wait_for(stdout.readline(), STEP_S)).decode().strip()

    def pod(self, name: str) -> dict[str, Any] | None:
        status, answer = self.server.request("GET", self.path(name))
        assert status in (200, 404), answer
        return answer if status == 200 else None

    async def chaos(self, *args: str, user: str = "admin") -> tuple[int, str]:
        command = [sys.executable, "-m", "polyrl_cli.app", "chaos", *args, "--on", "kubernetes", "--kubeconfig"]
        kubeconfig = str(self.server.kubeconfig(user, self.namespace))
        process = await asyncio.create_subprocess_exec(
            *command, kubeconfig, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), STEP_S)
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def refused(self, *args: str, user: str = "admin") -> str:
        code, output = await self.chaos(*args, user=user)
        assert code == 2, output
        assert output.count("\n") == 1, f"one sentence: {output}"
        return output

    async def until_status(self, name: str, wanted: str) -> None:
        async with asyncio.timeout(STEP_S):
            # The kernel tells nobody.
            while self.engines[name].status() != wanted:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    def allow(self, **rights: tuple[str, list[str]]) -> None:
        """Gives the user `operator` these and what it takes to look."""
        rules = [
            {"apiGroups": [group], "resources": [what], "verbs": verbs}
            for group, (what, verbs) in (*READ_PODS.items(), *(("", right) for right in rights.values()))
        ]
        place = f"{RBAC}/namespaces/{self.namespace}"
        role = {"metadata": {"name": "chaos"}, "rules": rules}
        subject = {"kind": "User", "name": "operator", "apiGroup": "rbac.authorization.k8s.io"}
        ref = {"kind": "Role", "name": "chaos", "apiGroup": "rbac.authorization.k8s.io"}
        binding = {"metadata": {"name": "chaos"}, "subjects": [subject], "roleRef": ref}
        for kind, one in (("roles", role), ("rolebindings", binding)):
            status, answer = self.server.request("POST", f"{place}/{kind}", one)
            assert status == 201, answer

    async def close(self) -> None:
        for engine in self.engines.values():
            with suppress(psutil.NoSuchProcess):
                engine.kill()
        for worker in self.workers.values():
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
        self.server.request("DELETE", f"/api/v1/nodes/node-{self.namespace}")

    def _patch(self, path: str, change: Any) -> None:
        status, answer = self.server.request("PATCH", path, change, content="application/merge-patch+json")
        assert status == 200, answer


@pytest.fixture
async def bed(server: Any, tmp_path: Path) -> AsyncIterator[Bed]:
    """A job with two rollouts and a manager, and one rollout that never began."""
    namespace = f"chaos-{uuid.uuid4().hex[:8]}"
    assert server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})[0] == 201
    kubelet = Kubelet(tmp_path)
    await kubelet.start()
    bed = Bed(server, kubelet, namespace=namespace, folder=tmp_path)
    try:
        bed.add_node()
        bed.add_job()
        await bed.add_pod("job-r-1", "rollout")
        await bed.add_pod("job-r-2", "rollout", alive=False)
        await bed.add_pod("job-manager-1", "manager")
        yield bed
    finally:
        await bed.close()
        await kubelet.stop()


async def test_an_engine_is_frozen_from_inside_and_thaws_alone(bed: Bed) -> None:
    code, output = await bed.chaos("freeze", "job", "--role", "engine", "--for", f"{FREEZE_S}", "--seed", "7")
    assert code == 0, output
    assert output == f"job in namespace {bed.namespace}: the engine of job-r-1 frozen for {FREEZE_S} s (seed 7)\n"
    assert bed.kubelet.asked == [("job-r-1", "rollout")]
    await bed.until_status("job-r-1", psutil.STATUS_STOPPED)
    await bed.until_status("job-r-1", psutil.STATUS_SLEEPING)


async def test_while_a_fault_lasts_there_is_no_other_one(bed: Bed) -> None:
    code, output = await bed.chaos("freeze", "job", "--role", "engine", "--for", f"{ALL_TEST_S}")
    assert code == 0, output
    assert "another fault lasts there; wait for its end" in await bed.refused("slow", "job", "--role", "engine")
    assert bed.engines["job-r-1"].status() == psutil.STATUS_STOPPED


async def test_an_engine_is_killed_and_its_agent_lives(bed: Bed) -> None:
    code, output = await bed.chaos("kill", "job", "--role", "engine")
    assert code == 0, output
    await bed.until_status("job-r-1", psutil.STATUS_ZOMBIE)
    assert bed.workers["job-r-1"].returncode is None
    assert "no engine process lives there" in await bed.refused("kill", "job", "--role", "engine")


async def test_an_agent_is_cut_off_and_let_back(bed: Bed) -> None:
    code, output = await bed.chaos("partition", "job", "--for", "0.5")
    assert code == 0, output
    assert [await bed.output("job-r-1"), await bed.output("job-r-1")] == [f"got {PARTITION:d}", f"got {HEAL:d}"]
    output = await bed.refused("partition", "job", "--direction", "in")
    assert "has not greeted the manager yet" in output, "its stand-in has no handler for that signal"


@pytest.mark.parametrize(
    ("flags", "victim", "grace", "partitioned"),
    [
        (("preempt", "job", "--for", "20.5"), "job-r-1", 21, False),
        (("kill", "job"), "job-r-1", 1, True),
        (("kill", "job", "--role", "manager"), "job-manager-1", 1, False),
    ],
)
async def test_a_pod_is_deleted(bed: Bed, flags: tuple[str, ...], victim: str, grace: int, partitioned: bool) -> None:
    code, output = await bed.chaos(*flags)
    assert code == 0, output
    assert f"its pod is deleted with a grace of {grace} s" in output
    pod = bed.pod(victim)
    assert pod is not None, "the kubelet has not said yet that it is gone"
    assert pod["metadata"]["deletionGracePeriodSeconds"] == grace
    assert bed.kubelet.asked == ([(victim, "rollout")] if partitioned else [])
    if partitioned:
        assert await bed.output(victim) == f"got {PARTITION:d}"
    role = flags[-1] if "--role" in flags else "rollout"
    assert f"does not have a live {role} now" in await bed.refused(*flags)


async def test_what_pods_do_not_take_is_an_error(bed: Bed) -> None:
    for role in ("agent", "manager", "trainer"):
        assert "is process 1 of its container, which nothing inside can stop" in await bed.refused(
            "freeze", "job", "--role", role
        )
    assert "alive: job-r-1" in await bed.refused("kill", "job", "--worker", "job-r-2")
    assert "there is no PolyRLJob other in namespace" in await bed.refused("kill", "other")
    assert "name the job" in await bed.refused("kill")
    assert not bed.kubelet.asked


async def test_a_missing_right_is_named(bed: Bed) -> None:
    assert 'cannot get resource "polyrljobs"' in await bed.refused("kill", "job", user="operator")
    bed.allow()
    assert 'cannot delete resource "pods"' in await bed.refused("preempt", "job", user="operator")
    output = await bed.refused("freeze", "job", "--role", "engine", user="operator")
    assert "it takes get and create of pods/exec" in output
    assert "pods/exec" in await bed.refused("kill", "job", user="operator")
    pod = bed.pod("job-r-1")
    assert pod is not None
    assert "deletionTimestamp" not in pod["metadata"]


async def test_its_rights_are_enough(bed: Bed) -> None:
    bed.allow(exec=("pods/exec", ["get", "create"]), delete=("pods", ["delete"]))
    code, output = await bed.chaos("kill", "job", user="operator")
    assert code == 0, output


async def test_a_container_without_a_python_is_a_sentence(bed: Bed) -> None:
    bed.workers["job-r-1"].kill()
    await bed.workers["job-r-1"].wait()
    assert "no engine process lives there" in await bed.refused("freeze", "job", "--role", "engine")
    await bed.kubelet.stop()
    code, output = await bed.chaos("freeze", "job", "--role", "engine")
    assert code != 0
    assert "Traceback" not in output
    await bed.kubelet.start()
