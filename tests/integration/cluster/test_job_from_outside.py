"""`polyrl get`, `top` and `report` over HTTP and a WebSocket: the test plays API server and kubelet, and runs here what
is to run there; the manager is a real one."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash
import yaml
from aiohttp import web

from polyrl.cluster import names
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.workers import manager_pod, trainer_job
from polyrl.errors import PolyRLError, RunFailed, UserError
from polyrl.keys import ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.manifest.job import PolyRLJob
from polyrl.page.page import without_scripts
from polyrl_cli.model.get import get_from_cluster
from polyrl_cli.page.live import PageServer
from polyrl_cli.remote.cluster import ClusterOptions
from polyrl_cli.remote.manager import page_of_job
from polyrl_cli.remote.top import show_job_top
from polyrl_operator.secret import make_certificate, write_run_keys
from polyrl_rollout.manager.api import https_of
from polyrl_rollout.manager.server import Listen, Manager
from polyrl_trainer.client import RolloutClient

EXAMPLE = Path(__file__).parents[3] / "examples/sort-digits/job.yaml"
STEP_S = 60.0
WEIGHTS = bytes(range(256)) * 20_000
"""More than any one message or buffer holds."""
PROTOCOL = "v4.channel.k8s.io"
CORE, PODS = "/api/v1/namespaces/ns", "/api/v1/namespaces/ns/pods"


@dataclass
class Cluster:
    """One job in one namespace, and its run's folder."""

    run: Path
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    made: list[dict[str, Any]] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    breaks_after: int | None = None
    """Bytes of stdout after which the connection is gone."""
    forbids: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        manifest = yaml.safe_load(EXAMPLE.read_text())
        self.job = manifest | {
            "metadata": {"name": "job", "namespace": "ns", "uid": "uid"},
            "status": {"state": "Running"},
        }
        owner = Owner("job", "ns", "uid", PolyRLJob.model_validate(manifest), Settings("m", "t", rollout_image="r"))
        self.trainer = trainer_job(owner)
        self.trainer["spec"]["template"]["spec"]["containers"][0]["command"][0] = sys.executable

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/apis/polyrl.dev/v1alpha1/namespaces/ns/polyrljobs/job", self._job)
        app.router.add_get("/apis/batch/v1/namespaces/ns/jobs/job-trainer", self._trainer)
        app.router.add_get(PODS, self._list)
        app.router.add_post(PODS, self._create)
        app.router.add_delete(f"{PODS}/{{name}}", self._delete)
        app.router.add_get(f"{PODS}/{{name}}/exec", self._exec)
        return app

    def add_trainer(self, phase: str) -> None:
        template = self.trainer["spec"]["template"]
        state = "running" if phase == "Running" else "terminated"
        status = {"phase": phase, "containerStatuses": [{"name": "trainer", "state": {state: {}}}]}
        metadata = template["metadata"] | {"name": "job-trainer-0-x", "uid": "pod"}
        self.pods["job-trainer-0-x"] = {"metadata": metadata, "spec": template["spec"], "status": status}

    def add_manager(self, port: int) -> None:
        owner = Owner("job", "ns", "uid", PolyRLJob.model_validate(self.job), Settings("m", "t", rollout_image="r"))
        pod = manager_pod(owner, 0)
        pod["metadata"] |= {"uid": "manager-pod"}
        pod["spec"]["containers"][0]["command"][0] = sys.executable
        status = {"phase": "Running", "containerStatuses": [{"name": "manager", "state": {"running": {}}}]}
        self.pods["job-manager-0"] = {"metadata": pod["metadata"], "spec": pod["spec"], "status": status}
        self.job["spec"]["manager"] = {"port": port}

    async def _job(self, _: web.Request) -> web.Response:
        return web.json_response(self.job)

    async def _trainer(self, _: web.Request) -> web.Response:
        return web.json_response(self.trainer)

    async def _list(self, request: web.Request) -> web.Response:
        field_selector = request.query.get("fieldSelector", "")
        wanted = [pod for name, pod in self.pods.items() if field_selector in ("", f"metadata.name={name}")]
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": wanted})

    async def _create(self, request: web.Request) -> web.Response:
        if "create" in self.forbids:
            return web.json_response({"message": "no", "reason": "Forbidden"}, status=403)
        pod = await request.json()
        pod["metadata"]["uid"] = "made"
        self.made.append(pod)
        self.pods[pod["metadata"]["name"]] = pod | {"status": {"phase": "Running"}}
        return web.json_response(pod, status=201)

    async def _delete(self, request: web.Request) -> web.Response:
        return web.json_response(self.pods.pop(request.match_info["name"]))

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        if "exec" in self.forbids:
            return web.json_response({}, status=403)
        self.entered.append(request.match_info["name"])
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        words = request.query.getall("command")
        self.commands.append(words)
        here = {names.RUN_DIR: str(self.run), names.KEYS_DIR: str(self.run.parent / "keys")}
        command = [re.sub("|".join(here), lambda found: here[found[0]], word) for word in words]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        sent = 0
        while part := await process.stdout.read(30_000):
            sent += len(part)
            if self.breaks_after is not None and sent > self.breaks_after:
                process.kill()
                # What is left unread would keep its pipe open, and the wait for its end would have none.
                await process.communicate()
                break
            await socket.send_bytes(b"\x01" + part)
        await process.wait()
        if self.breaks_after is None:
            await socket.send_bytes(b"\x03" + json.dumps({"status": "Success"}).encode())
        await socket.close()
        return socket


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    place = folder / "checkpoints/rl-step-000002"
    (place / "model").mkdir(parents=True)
    (place / "model/model.safetensors").write_bytes(WEIGHTS)
    sealed = {"size": len(WEIGHTS), "xxh3": xxhash.xxh3_128(WEIGHTS).hexdigest()}
    (place / "COMPLETE.json").write_text(json.dumps({"serial": 1, "files": {"model/model.safetensors": sealed}}))
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


@pytest.fixture
async def cluster(run: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(run)
    runner = web.AppRunner(cluster.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {"token": "t"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
    }  # fmt: skip
    (run.parent / "kubeconfig").write_text(yaml.safe_dump(config))
    yield cluster
    await runner.cleanup()


async def get(cluster: Cluster) -> tuple[Path, list[str]]:
    target, printed = cluster.run.parent / "got", list[str]()
    options = ClusterOptions(cluster.run.parent / "kubeconfig")
    await asyncio.wait_for(asyncio.to_thread(get_from_cluster, "job", target, None, options, printed.append), STEP_S)
    return target, printed


@pytest.mark.parametrize("phase", ["Running", "Succeeded", "Failed", "none"])
async def test_all_of_it_comes_from_the_trainer_or_from_a_reader(cluster: Cluster, phase: str) -> None:
    if phase != "none":
        cluster.add_trainer(phase)
    before = dict(cluster.pods)
    target, printed = await get(cluster)
    assert {str(path.relative_to(target)) for path in target.rglob("*.*")} == {
        "model/model.safetensors", "metrics.jsonl", "job.json", "status.json",
    }  # fmt: skip
    assert (target / "model/model.safetensors").read_bytes() == WEIGHTS
    PolyRLJob.model_validate_json((target / "job.json").read_bytes())
    assert printed == [f"{target}: the model of rl-step-000002, 2 files, {len(WEIGHTS) + 3:,} bytes"]
    if phase == "Running":
        assert (cluster.entered, cluster.made) == (["job-trainer-0-x"], [])
    else:
        assert cluster.entered == [cluster.made[0]["metadata"]["name"]]
    assert cluster.pods == before, "the reader is gone again"


@pytest.mark.parametrize(
    ("forbidden", "breaks_after", "error", "sentence"),
    [
        ("create", None, UserError, "it takes create and delete of pods"),
        ("exec", None, UserError, "it takes get and create of pods/exec"),
        ("", 1_000_000, RunFailed, "the connection ended before the command"),
    ],
)
async def test_what_does_not_come_leaves_nothing_behind(
    cluster: Cluster, forbidden: str, breaks_after: int | None, error: type[PolyRLError], sentence: str
) -> None:
    cluster.forbids, cluster.breaks_after = frozenset({forbidden}), breaks_after
    with pytest.raises(error, match=sentence):
        await get(cluster)
    assert cluster.pods == {}
    assert sorted(path.name for path in cluster.run.parent.iterdir()) == ["kubeconfig", "run"]


@pytest.fixture
async def manager(cluster: Cluster) -> AsyncIterator[Manager]:
    """A real one as in its pod: HTTPS, and its files where the pod has them."""
    keys = cluster.run.parent / "keys"
    write_run_keys(keys)
    made = make_certificate(["job-manager", "job-manager.ns"])
    (keys / "ca.crt").write_bytes(made.authority)
    (keys / "tls.crt").write_bytes(made.certificate)
    (keys / "tls.key").write_bytes(made.key)
    tls = https_of("127.0.0.1", keys / "tls.crt", keys / "tls.key")
    own, job = read_keys(ManagerKeys, keys / "manager.key"), PolyRLJob.model_validate(cluster.job)
    async with Manager(Ledger(LedgerConfig(run_epoch=1)), own, 1, Listen(tls=tls), job=job) as manager:
        running = asyncio.create_task(manager.run())
        cluster.add_manager(int(manager.endpoints.http.rpartition(":")[2]))
        async with RolloutClient.connect(manager.endpoints.trainer, keys / "trainer.key", 1) as client:
            await client.report("rl", 7, {"reward/mean": 0.625, "timing_s/step": 2.0})
        yield manager
        manager.stop()
        await running


async def test_the_page_and_the_picture_of_a_live_job_come_without_its_token(
    cluster: Cluster, manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ClusterOptions(cluster.run.parent / "kubeconfig")
    page = await asyncio.wait_for(asyncio.to_thread(page_of_job, "job", options), STEP_S)
    assert page.startswith(without_scripts(""))
    assert "0.625 → 0.625" in page
    assert "7 of" in page
    await asyncio.wait_for(asyncio.to_thread(show_job_top, "job", options, once=True), STEP_S)
    shown = capsys.readouterr().out
    assert "7/" in shown
    assert "reward 0.625" in shown
    token = read_keys(ManagerKeys, cluster.run.parent / "keys/manager.key").http_token
    assert cluster.entered == ["job-manager-0"] * 2
    assert token not in page + shown + json.dumps(cluster.commands)


async def test_a_live_page_is_only_for_whoever_was_given_its_address(cluster: Cluster, manager: Manager) -> None:
    options = ClusterOptions(cluster.run.parent / "kubeconfig")
    with PageServer(lambda: page_of_job("job", options)) as server:
        serving = asyncio.create_task(asyncio.to_thread(server.serve_forever, 0.05))

        def ask(url: str, host: str | None = None) -> tuple[int, str]:
            request = urllib.request.Request(url, headers={"Host": host} if host else {})
            try:
                with urllib.request.urlopen(request, timeout=STEP_S) as answer:
                    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        status, text = await asyncio.to_thread(ask, server.url)
        assert status == 200
        assert 'http-equiv="refresh"' in text
        for url, host in ((server.url[:-1], None), (f"http://{server.origin}/", None), (server.url, "evil.example")):
            assert (await asyncio.to_thread(ask, url, host))[0] == 404
        cluster.pods.clear()
        status, text = await asyncio.to_thread(ask, server.url)
        assert status == 503
        assert "no manager at work" in text
        server.shutdown()
        await serving
