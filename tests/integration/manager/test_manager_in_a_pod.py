"""`python -m polyrl_rollout.manager` as a pod runs it: HTTPS with the run's own certificate, an end that is none."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from polyrl.control import Endpoints, parse_endpoints
from polyrl.keys import OperatorKeys, read_keys
from polyrl.status import ManagerStatus
from polyrl.testing.started import StartedProcess, ran
from polyrl_operator.secret import make_certificate, write_run_keys
from polyrl_trainer.client import RolloutClient

DEADLINE_S = 60.0
EPOCH = 1
JOB = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "test"},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {"path": "model"},
            "data": {"rl": [{"path": "prompts.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": 1},
        }
    },
}


HOST = "run-manager"
"""For whom the certificate is; the clients here dial the loopback and ask for that name."""


def write_certificate(folder: Path, name: str) -> None:
    """name.crt, name.key, and name.ca, the authority that signed it."""
    made = make_certificate([HOST])
    for ending, text in (("crt", made.certificate), ("key", made.key), ("ca", made.authority)):
        (folder / f"{name}.{ending}").write_bytes(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run_keys(tmp_path / "keys")
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    write_certificate(tmp_path, "tls")
    return tmp_path


def command(run: Path, *more: str) -> list[str]:
    argv = [sys.executable, "-m", "polyrl_rollout.manager", "--job", f"{run}/job.json", "--epoch", str(EPOCH)]
    argv += ["--keys", f"{run}/keys/manager.key", "--journal", f"{run}/journal.sqlite"]
    return [*argv, "--endpoints", f"{run}/manager.json", *more]


class Pod:
    """A manager that is started again in place, as a kubelet does."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> Endpoints:
        file = self.run / "manager.json"
        file.unlink(missing_ok=True)
        tls = ("--tls-cert", f"{self.run}/tls.crt", "--tls-key", f"{self.run}/tls.key")
        with (self.run / "log").open("ab") as log:
            self.process = StartedProcess(command(self.run, *tls, "--stay"), stderr=log)
        async with asyncio.timeout(DEADLINE_S):
            while not file.exists():  # noqa: ASYNC110 - nothing announces a file
                await asyncio.sleep(0.02)
        return parse_endpoints(file.read_bytes(), str(file))

    def client(self) -> object:
        return RolloutClient.connect(self.run / "manager.json", self.run / "keys/trainer.key", EPOCH)

    async def status(self, url: str, authority: str = "tls.ca") -> ManagerStatus:
        token = read_keys(OperatorKeys, self.run / "keys/operator.key").http_token
        context = ssl.create_default_context(cafile=str(self.run / authority))
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session,
            session.get("/v1/status", ssl=context, server_hostname=HOST) as response,
        ):
            return msgspec.json.decode(await response.read(), type=ManagerStatus)

    async def logs(self, event: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while event not in (self.run / "log").read_text():  # noqa: ASYNC110 - nothing announces a line
                await asyncio.sleep(0.02)

    async def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, DEADLINE_S)


@pytest.fixture
def pod(run: Path) -> Iterator[Pod]:
    made = Pod(run)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()


async def test_its_api_is_encrypted_and_its_certificate_can_be_pinned(pod: Pod) -> None:
    url = (await pod.start()).http
    assert url.startswith("https://127.0.0.1:")
    assert (await pod.status(url)).run_epoch == EPOCH
    write_certificate(pod.run, "other")
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await pod.status(url, "other.ca")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(url.replace("https", "http") + "/healthz")


async def test_the_final_status_stays_and_outlives_a_restart(pod: Pod) -> None:
    url = (await pod.start()).http
    async with pod.client() as client:  # type: ignore[attr-defined]
        await client.finish(True, "all steps done")
    assert (await pod.status(url)).finished
    await pod.logs("the run is over")
    assert (await pod.status(url)).finished
    await pod.end(signal.SIGKILL)
    status = await pod.status((await pod.start()).http)
    assert (status.finished, status.ok, status.message) == (True, True, "all steps done")
    async with pod.client() as client:  # type: ignore[attr-defined]
        await client.finish(True, "said again by a trainer whose machine died before its end was seen")
    assert await pod.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--bind", "*"), "--bind *: needs --tls-cert and --tls-key"),
        (("--bind", "0.0.0.0"), "--bind 0.0.0.0: needs --tls-cert and --tls-key"),
        (("--bind", "manager"), "--bind manager: is not an IP address"),
        (("--tls-cert", "tls.crt"), "give both or neither"),
        (("--tls-cert", "tls.crt", "--tls-key", "nowhere.key"), "not a certificate and its key: No such file"),
        (("--tls-cert", "tls.crt", "--tls-key", "job.json"), "not a certificate and its key"),
    ],
)
def test_wrong_encryption_is_one_sentence_and_exit_2(run: Path, more: tuple[str, ...], sentence: str) -> None:
    ended = ran(command(run, *more), cwd=run, timeout_s=DEADLINE_S)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
