"""A job's pods as processes: the containers that the cluster side builds, started as a kubelet would, and disturbed.

The trainer is asked to leave in mid-run and a successor goes on; the manager is killed and started again in place, and
the reserved engine's agent by the trainer's container. Nothing is lost, no step is done twice, and the run ends well
and stays so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from polyrl.cluster import names
from polyrl.cluster.actions import MakeKeys, Object
from polyrl.cluster.resources.fixed import config_map, manager_hosts
from polyrl.cluster.resources.owner import Owner, Settings
from polyrl.cluster.resources.pod import PYTHON
from polyrl.cluster.resources.workers import manager_pod, rollout_pod, trainer_job
from polyrl.manifest.environment import inherited
from polyrl.parent_death_signal import PARENT_PID
from polyrl.sample import Pool
from polyrl.status import ManagerStatus
from polyrl.worker import HANDED_OVER_EXIT, Role
from polyrl_cli.inspection.check import audit_journal
from polyrl_cli.manifests.load import load_manifest
from polyrl_cli.report.timeline import read_metrics
from polyrl_operator.secret import engine_secret, keys_secret, manager_credentials, role_secrets
from tests.integration.local.job_runs import held_reward

EXAMPLE = Path(__file__).parents[3] / "examples" / "sort-digits"
FILES = ("sft.jsonl.gz", "rl.jsonl", "eval.jsonl")
DEADLINE_S = 500.0
POLL_S = 0.05
STEPS = 10
HELD_AT = 6
"""The job waits here until the last thing is done to it."""
SMALL = {
    "spec.recipe.sft.steps": 4,
    "spec.recipe.algorithm.steps": STEPS,
    "spec.recipe.algorithm.promptsPerStep": 8,
    "spec.recipe.algorithm.miniBatchPrompts": 4,
    "spec.recipe.algorithm.minMicroBatchSamples": 16,
    "spec.recipe.reward.timeoutSeconds": int(DEADLINE_S),
    "spec.recipe.evaluation.everySteps": 0,
    "spec.recipe.evaluation.maxSamples": 16,
    "spec.recipe.checkpoint.everySteps": 2,
    "spec.rollout.replicas": 1,
    "spec.rollout.maxReplicas": 1,
    "spec.faultInjection": "[]",
}
SETTINGS = Settings("manager", "trainer", rollout_image="rollout")
HOST = "127.0.0.1"


class Kubelet:
    """Mounts what pods name under a folder, and runs their containers there."""

    def __init__(self, root: Path, owner: Owner, ports: dict[int, int]) -> None:
        self.root, self.owner, self.ports = root, owner, ports
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.config = config_map(owner)
        make_keys = MakeKeys(names.keys_secret_name(owner.name), manager_hosts(owner), now=time.time())
        self.root_secret = keys_secret(owner, make_keys)
        self.root_secret["metadata"]["uid"] = "root"
        of_roles = role_secrets(owner, self.root_secret, make_keys)
        self.secrets = {one["metadata"]["name"]: one["data"] for one in of_roles}
        rollout = names.pod_name(owner.name, Role.ROLLOUT, 1)
        self.secrets[rollout] = engine_secret(owner, self.root_secret, rollout, "uid")["data"]
        for folder in (names.RUN_DIR, names.JOURNAL_DIR, "/tmp"):
            self.path(folder).mkdir(parents=True)
        moved = {key: self._moved(text).encode() for key, text in self.config["data"].items()}
        self._mount(names.JOB_DIR, moved)
        self.go_on = self.root / "go-on"
        reward = held_reward(EXAMPLE, HELD_AT, self.path(f"{names.RUN_DIR}/metrics.jsonl"), self.go_on)
        files = {name: (EXAMPLE / name).read_bytes() for name in FILES}
        self._mount(names.MANIFEST_DIR, {**files, "reward.py": reward.encode()})

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def start(self, pod: Object, container: Object) -> subprocess.Popen[bytes]:
        """One container of a pod; its Secret's files are mounted where it alone sees them."""
        name = container["name"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            secret = volumes[mount["name"]].get("secret")
            if secret is not None and not self.path(keys := f"{mount['mountPath']}-{name}").exists():
                data = self.secrets[secret["secretName"]]
                files = {item["key"]: base64.b64decode(data[item["key"]]) for item in secret["items"]}
                self._mount(keys, files, mode=0o400)
        env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        env |= {"POLYRL_ADVERTISE_HOST": HOST, "POLYRL_POD_NAME": f"{names.trainer_name(self.owner.name)}-0-x7k2p"}
        argv = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], part) for part in container["command"]]
        argv = [re.sub(r"^(/polyrl/\S*keys)/", rf"\1-{name}/", part) for part in argv]
        argv = [sys.executable if part == PYTHON else self._moved(part) for part in argv]
        own = inherited(os.environ, ("PATH", "PYTHONPATH")) | {PARENT_PID: str(os.getpid())}
        placed = {key: str(self.path(value)) if value.startswith("/tmp") else value for key, value in env.items()}
        with (self.root / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(argv, env={**placed, **own}, stdout=log, stderr=log)
        return self.running[name]

    async def ended(self, name: str) -> int:
        code = await asyncio.to_thread(self.running[name].wait, DEADLINE_S)
        print(name, "ended with", code)
        return code

    async def until(self, holds: Callable[[], object], what: str, needs: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                assert self.running[needs].poll() is None, f"{needs} ended before {what}:\n{self.log(needs)}"
                await asyncio.sleep(POLL_S)

    def log(self, name: str) -> str:
        return self.whole_log(name)[-4000:]

    def whole_log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()

    def steps(self) -> list[int]:
        metrics = self.path(f"{names.RUN_DIR}/metrics.jsonl")
        return [report.step for report in read_metrics(metrics) if report.phase == "rl"]

    async def status(self) -> ManagerStatus:
        """As the operator asks for it: by the Service's name, with the token, and the authority pinned."""
        known = manager_credentials(self.root_secret)
        trust = ssl.create_default_context(cadata=known.authority)
        url = f"https://{HOST}:{self.ports[self.owner.job.spec.manager.port]}/v1/status"
        headers = {"Authorization": f"Bearer {known.token}"}
        name = names.manager_service(self.owner.name)
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session,
            session.get(url, ssl=trust, server_hostname=name, headers=headers) as answer,
        ):
            return msgspec.json.decode(await answer.read(), type=ManagerStatus)

    def _moved(self, text: str) -> str:
        """Paths and addresses of a pod as they are here."""
        text = text.replace("/polyrl/", f"{self.root}/polyrl/")
        text = re.sub(rf"{names.manager_service(self.owner.name)}(\.[\w.]+)?", HOST, text)
        for port, here in self.ports.items():
            text = re.sub(rf"(?<=:){port}\b|^{port}$", str(here), text)
        return HOST if text == "*" else text

    def _mount(self, path: str, files: dict[str, bytes], mode: int = 0o444) -> None:
        """Links to links in a folder that cannot be written to."""
        folder = self.path(path)
        real = folder / "..2026"
        real.mkdir(parents=True)
        (folder / "..data").symlink_to(real.name)
        for name, content in files.items():
            (real / name).write_bytes(content)
            (real / name).chmod(mode)
            (folder / name).symlink_to(f"..data/{name}")


def reserved_agents(kubelet: Kubelet) -> list[psutil.Process]:
    """Below the trainer's container, its engines' processes left out."""
    found = []
    for process in psutil.Process(kubelet.running["trainer"].pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [process] if "polyrl_rollout.agent" in process.cmdline() else []
    return found


def free_ports(count: int) -> list[int]:
    """As many different ones, free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[Kubelet]:
    sets = [f"{path}={value}" for path, value in SMALL.items()]
    job = load_manifest(EXAMPLE / "job.yaml", sets)
    fixed = (job.spec.manager.port, names.AGENTS_PORT, names.TRAINER_PORT, names.PUBLISHER_PORT, names.EXCHANGE_PORT)
    made = Kubelet(
        tmp_path,
        Owner("sort-digits", "default", "uid", job=job, settings=SETTINGS),
        dict(zip(fixed, free_ports(5), strict=True)),
    )
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
async def test_a_job_in_pods_outlives_every_container_and_ends_once(kubelet: Kubelet) -> None:
    manager = manager_pod(kubelet.owner, 1)
    trainer = trainer_job(kubelet.owner)["spec"]["template"]
    rollout = rollout_pod(kubelet.owner, 1, Pool.SPOT)
    (main,) = trainer["spec"]["containers"]
    serving = manager["spec"]["containers"][0]

    kubelet.start(trainer, main)  # long before there is a manager
    kubelet.start(manager, serving)
    kubelet.start(rollout, rollout["spec"]["containers"][0])
    await kubelet.until(lambda: len(kubelet.steps()) >= 2, "step 2", needs="trainer")
    kubelet.running["trainer"].send_signal(signal.SIGTERM)
    assert await kubelet.ended("trainer") == HANDED_OVER_EXIT, kubelet.log("trainer")
    assert not (await kubelet.status()).finished, "a successor goes on"

    kubelet.start(trainer, main)
    await kubelet.until(lambda: len(kubelet.steps()) >= 4, "step 4", needs="trainer")
    (agent,) = reserved_agents(kubelet)
    agent.kill()
    kubelet.running["manager"].kill()
    await kubelet.ended("manager")
    kubelet.start(manager, serving)
    await kubelet.until(lambda: agent not in reserved_agents(kubelet) != [], "another agent", needs="trainer")
    kubelet.go_on.touch()
    assert await kubelet.ended("trainer") == 0, kubelet.log("trainer")
    assert "[reserved 0] ended with exit status 137; started again in 1 s" in kubelet.whole_log("trainer")

    kubelet.start(trainer, main)  # its machine died before its end was seen
    assert await kubelet.ended("trainer") == 0, kubelet.log("trainer")
    assert await kubelet.ended("rollout") == 0, kubelet.log("rollout")
    status = await kubelet.status()
    assert (status.finished, status.ok, status.message) == (True, True, "done")
    samples = status.samples
    assert samples.submitted == samples.acknowledged + sum(samples.discarded.values())
    assert samples.acknowledged >= STEPS * 8 * 8
    step = status.finished_steps[-1]
    assert step.step == STEPS
    assert step.busy_engine_seconds > 0
    assert 0 <= step.shared_engine_seconds <= step.busy_engine_seconds
    assert kubelet.steps() == list(range(1, STEPS + 1)), "each step once"
    kubelet.running["manager"].send_signal(signal.SIGTERM)
    assert await kubelet.ended("manager") == 0
    broken = [
        verdict for verdict in audit_journal(kubelet.path(f"{names.JOURNAL_DIR}/journal.sqlite")) if verdict.broken
    ]
    assert not broken, broken
