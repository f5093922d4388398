"""The operator on a bare API server: stand-ins for nodes, namespaces of their own for jobs."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import signal
import ssl
import sys
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from polyrl.cluster.names import trainer_name
from polyrl.control import DRAIN_PATH, STATUS_PATH, DrainAnswer, DrainRequest
from polyrl.keys import OperatorKeys, parse_keys
from polyrl.status import ManagerStatus
from polyrl_operator.api.client import Client
from polyrl_operator.api.connect import load_configuration, stream_session
from polyrl_operator.api.kinds import FIXED, JOB, POD, SECRET, TRAINER
from polyrl_operator.app import Operator, Options, operator
from polyrl_operator.managers.client import Address
from polyrl_operator.secret import Certificate, ManagerCredentials, make_certificate
from polyrl_operator.testing.fake_nodes import FakeNodes

ROOT = Path(__file__).parents[3]
DEADLINE_S = 150.0
"""For what takes seconds: on crowded cores a process alone takes one of its own to start."""
POLL_S = 0.05


def manifest(name: str = "job", **spec: Any) -> dict[str, Any]:
    """A job with two rollouts and nothing that needs a volume."""
    rollout = {"replicas": 2, "minReplicas": 0, "maxReplicas": 8} | spec.pop("rollout", {})
    wanted = {
        "recipe": {
            "mode": "rl",
            "model": {"path": "model"},
            "data": {"rl": [{"path": "prompts.jsonl"}]},
            "reward": {"function": "rewards:exact"},
            "algorithm": {"steps": 4},
        },
        "rollout": rollout,
    }
    return {
        "apiVersion": "polyrl.dev/v1alpha1",
        "kind": "PolyRLJob",
        "metadata": {"name": name},
        "spec": wanted | spec,
    }


@dataclass
class Place:
    """One namespace of the API server."""

    configuration: Configuration
    client: Client
    namespace: str
    server: Any

    def options(self, **changed: Any) -> Options:
        """Of an operator for this namespace."""
        given: dict[str, Any] = {
            "manager_image": "polyrl-manager",
            "trainer_image": "polyrl-trainer",
            "rollout_image": "polyrl-rollout",
            "namespace": [self.namespace],
            "lease_namespace": self.namespace,
            "identity": f"test-{uuid.uuid4().hex[:6]}",
            "host": "127.0.0.1",
            "metrics_port": 0,
            "health_port": 0,
            "nodes": False,
            "kubeconfig": self.server.kubeconfig(),
        }
        return Options(**given | changed)

    async def submit(self, name: str = "job", **spec: Any) -> dict[str, Any]:
        """Creates a job."""
        job = manifest(name, **spec)
        job["metadata"]["namespace"] = self.namespace
        return await self.client.create(job)

    async def job(self, name: str = "job") -> dict[str, Any]:
        """The job as stored."""
        stored = await self.client.get(JOB, self.namespace, name)
        assert stored is not None
        return stored

    async def pods(self, role: str = "") -> list[dict[str, Any]]:
        """Pods of all jobs, or those of one role."""
        selector = f"polyrl.dev/role={role}" if role else ""
        return [pod async for pods, _ in self.client.pages(POD, self.namespace, selector) for pod in pods]

    async def children(self) -> set[tuple[str, str]]:
        """Kind and name of all children, pods and trainers with them."""
        return {
            (kind.name, item["metadata"]["name"])
            for kind in (*FIXED, SECRET, TRAINER, POD)
            async for items, _ in self.client.pages(
                kind, self.namespace, "app.kubernetes.io/managed-by=polyrl-operator"
            )
            for item in items
        }

    async def until(self, what: str, holds: Callable[[], Awaitable[Any]], deadline_s: float = DEADLINE_S) -> Any:
        """Waits until `holds` gives something true, and returns it."""
        until = time.monotonic() + deadline_s
        while True:
            found = await holds()
            if found:
                return found
            if time.monotonic() > until:
                job = await self.client.get(JOB, self.namespace, "job")
                status = json.dumps((job or {}).get("status"), indent=1)
                pytest.fail(f"not within {deadline_s} s: {what}; {await self.children()}; status {status}")
            await asyncio.sleep(POLL_S)

    async def rollouts(self, count: int, name: str = "job") -> list[dict[str, Any]]:
        """Waits until the job has `count` rollout pods that run."""

        async def enough() -> list[dict[str, Any]]:
            pods = [
                pod for pod in await self.pods("rollout") if pod["metadata"]["labels"]["polyrl.dev/job-name"] == name
            ]
            live = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
            running = [pod for pod in live if pod["status"].get("phase") == "Running"]
            return running if len(running) == len(live) == count else []

        found: list[dict[str, Any]] = await self.until(f"{count} rollouts run", enough) if count else []
        return found

    async def state(self, *wanted: str, name: str = "job") -> dict[str, Any]:
        """Waits until the job's state is one of these."""

        async def reached() -> dict[str, Any] | None:
            stored = await self.job(name)
            return stored if stored.get("status", {}).get("state") in wanted else None

        found: dict[str, Any] = await self.until(f"{name} is {' or '.join(wanted)}", reached)
        return found


@dataclass
class Process:
    """A running operator and what it says."""

    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]]
    reading: asyncio.Task[None]

    async def port_of(self, path: str) -> int:
        """Waits until it listens."""
        until = time.monotonic() + DEADLINE_S
        while True:
            for line in self.lines:
                if line.get("event") == "listens" and any(path in listed for listed in line["paths"]):
                    return int(line["port"])
            assert self.process.returncode is None, self.lines
            assert time.monotonic() < until, self.lines
            await asyncio.sleep(POLL_S)

    async def get(self, path: str) -> tuple[int, str]:
        """Asks one of its ports."""
        port = await self.port_of(path)
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, await answer.text()

    async def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(how)
        status = await asyncio.wait_for(self.process.wait(), DEADLINE_S)
        await self.reading
        return status

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == event]


@asynccontextmanager
async def operator_process(
    place: Any, *flags: str, kubeconfig: Any = None, name: str = "one"
) -> AsyncIterator[Process]:
    command = [sys.executable, "-m", "polyrl_operator", f"--namespace={place.namespace}", "--no-nodes"]
    command += [f"--lease-namespace={place.namespace}", "--host=127.0.0.1", "--metrics-port=0", "--health-port=0"]
    command += ["--no-metrics-secure"]
    command += ["--manager-image=m", "--trainer-image=t", "--rollout-image=r", *flags]
    environment = os.environ | {"KUBECONFIG": str(kubeconfig or place.server.kubeconfig()), "POD_NAME": name}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.PIPE)
    lines: list[dict[str, Any]] = []

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            try:
                lines.append(json.loads(line))
            except ValueError:
                lines.append({"event": "not JSON", "text": line.decode()})

    running = Process(process, lines, reading=asyncio.create_task(read()))
    try:
        yield running
    except BaseException:
        # What it said is the first thing to look at.
        print(*lines, sep="\n")
        raise
    finally:
        await running.end(signal.SIGKILL)


@pytest.fixture(autouse=True)
def _left_by_the_killed() -> Iterator[None]:
    """An operator that is killed amid a request closes nothing: its sockets are no fault of the next test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def start_operator(place: Any) -> Callable[..., Any]:
    return lambda *flags, **more: operator_process(place, *flags, **more)


class Manager:
    """Answers over TLS as a manager does; `status` is what it says, `drains` what it was asked for."""

    name = "job-manager"

    def __init__(self, folder: Path, certificate: Certificate, token: str) -> None:
        self.certificate, self.token = certificate, token
        self.status = ManagerStatus(seq=0, run_epoch=1)
        self.drains: list[DrainRequest] = []
        self.polls = 0
        self._changed = asyncio.Condition()
        (folder / "crt").write_bytes(self.certificate.certificate)
        (folder / "key").write_bytes(self.certificate.key)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(folder / "crt", folder / "key")
        self.port = 0

    @property
    def access(self) -> ManagerCredentials:
        return ManagerCredentials(self.token, self.certificate.authority.decode())

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port, pod_uid="pod-uid", name=self.name, poll_s=0.3)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(STATUS_PATH, self._status)
        app.router.add_post(DRAIN_PATH, self._drain)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def report(self, **changed: Any) -> None:
        async with self._changed:
            self.status = msgspec.structs.replace(self.status, seq=self.status.seq + 1, **changed)
            self._changed.notify_all()

    async def _status(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return web.Response(status=401)
        self.polls += 1
        since, wait = int(request.query["since"]), float(request.query["waitSeconds"])
        try:
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(lambda: self.status.seq > since)
        except TimeoutError:
            pass
        return web.Response(body=msgspec.json.encode(self.status))

    async def _drain(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=DrainRequest)
        self.drains.append(body)
        known = any(engine.name == body.engine for engine in self.status.engines)
        return web.Response(body=msgspec.json.encode(DrainAnswer(engine=body.engine, known=known)))


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[Manager]:
    """A manager of nobody's."""
    made = Manager(tmp_path, make_certificate([Manager.name]), "t" * 32)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def serve_manager(place: Place, tmp_path: Path) -> Callable[..., Any]:
    """Plays the manager of a job with its own keys: `await serve_manager(port)` once the job has them."""

    async def serve(port: int) -> Manager:
        secret = await place.until("the job has keys", lambda: place.client.get(SECRET, place.namespace, "job-keys"))
        own = await place.until(
            "its manager has them", lambda: place.client.get(SECRET, place.namespace, "job-keys-manager")
        )
        files = {name: base64.b64decode(text) for name, text in (secret["data"] | own["data"]).items()}
        certificate = Certificate(files["ca.crt"], files["ca.key"], files["tls.crt"], key=files["tls.key"])
        made = Manager(tmp_path, certificate, parse_keys(OperatorKeys, files["operator.key"], "test").http_token)
        made.port = port
        await made.start()
        return made

    return serve


@pytest.fixture(scope="session")
def crd(api_server: Any) -> Any:
    """The server with our CRD."""
    definition = yaml.safe_load((ROOT / "crds" / "polyrljobs.yaml").read_text())
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    status, answer = api_server.request("POST", path, definition)
    assert status in (201, 409), answer
    until = time.monotonic() + DEADLINE_S
    while api_server.request("GET", "/apis/polyrl.dev/v1alpha1/namespaces/nowhere/polyrljobs")[0] != 200:
        assert time.monotonic() < until, "the CRD is not served"
        time.sleep(POLL_S)
    return api_server


@pytest.fixture
async def place(crd: Any) -> AsyncIterator[Place]:
    """A fresh namespace."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    status, answer = crd.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    assert status == 201, answer
    configuration = await load_configuration(crd.kubeconfig())
    async with ApiClient(configuration) as api:
        place = Place(configuration, Client(api, field_manager="test"), name, crd)
        yield place
        for job in [job async for jobs, _ in place.client.pages(JOB, name) for job in jobs]:
            await place.client.delete(JOB, name, job["metadata"]["name"], job["metadata"]["uid"])


class Nodes(FakeNodes):
    """Ends no trainer before it has begun: the API server takes no such end."""

    def __init__(self, place: Place, session: aiohttp.ClientSession) -> None:
        super().__init__(place.client, session, place.configuration.host, node="fake-node")
        self._place = place

    async def finish_trainer(self, namespace: str, job: str) -> None:
        await self._place.until(f"the trainer of {job} has begun", lambda: self._began(namespace, job))
        await super().finish_trainer(namespace, job)

    async def _began(self, namespace: str, job: str) -> bool:
        stored = await self._place.client.get(TRAINER, namespace, trainer_name(job)) or {}
        return "startTime" in stored.get("status", {})


@pytest.fixture
async def nodes(place: Place) -> AsyncIterator[FakeNodes]:
    """Nodes on which pods run at once."""
    async with stream_session(place.configuration) as session:
        fake = Nodes(place, session)
        task = asyncio.create_task(fake.play())
        yield fake
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass
class Running:
    """An operator in this process, fed by its own lists instead of by kopf's watches."""

    one: Operator
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def running(place: Place, poll_s: float = 0.2, **changed: Any) -> AsyncIterator[Running]:
    """The operator without kopf: it lists every `look_s`."""
    configuration = await load_configuration(place.server.kubeconfig())
    async with operator(place.options(**changed), configuration) as one:
        held = Running(one)

        async def poll() -> None:
            while True:
                one.resync.request()
                await asyncio.sleep(poll_s)

        held.tasks = [asyncio.create_task(work) for work in (*one.tasks(), poll())]
        yield held
        await held.stop()


@pytest.fixture
def run_operator(place: Place) -> Callable[..., Any]:
    """Runs an operator in this process: `async with run_operator() as held`."""
    return lambda **changed: running(place, **changed)
