"""A bare API server with its etcd for tests that need Kubernetes' own judgement and no node, as envtest has it.

The binaries come from the folder that KUBEBUILDER_ASSETS names; without it these tests are skipped aloud, and one that
lacks what it should hold fails them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from polyrl.forks import ForkServer, own
from polyrl.manifest.environment import EVERY_WORKER, inherited
from polyrl_cli.local.loaded import LIBRARIES

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as processes have it that tests start; what wants a Hub says so

START_DEADLINE_S: Final = 60.0
"""etcd and the API server take 3 s on idle cores."""
POLL_S: Final = 0.05
"""Between looks at /readyz: nothing announces it."""

ADMIN: Final = "admin"
STRANGER: Final = "stranger"
"""A user without any right."""
OPERATOR: Final = "operator"
"""A user with the rights that a test gives it."""
TOKENS: Final = {
    ADMIN: 'admin-token,admin,1,"system:masters"',
    STRANGER: "stranger-token,stranger,2",
    OPERATOR: "operator-token,operator,3",
}


PASSED_ON: Final = (
    *(*EVERY_WORKER, "PYTHONPATH", "OMP_NUM_THREADS", "POLYRL_*", "PYTEST_*"),
    *("KUBE*", "SGLANG_*", "MOONCAKE_*", "MC_*", "LD_*"),
)
"""What tests leave of the environment of whoever starts them: little more than a run's workers get, since a process is
forked only where what its libraries may have read is the same."""


OF_THE_COMMAND: Final = ("polyrl_cli.local.run", "polyrl_cli.report.plot")
"""What `polyrl run` loads of its own; matplotlib, for a run's picture, takes it longer than all else that it does."""


@pytest.fixture(scope="session", autouse=True)
def loaded_libraries(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the processes that tests start with `StartedProcess`, and of ranks and engines of this one."""
    apart = all(item.get_closest_marker("api") or item.get_closest_marker("browser") for item in request.session.items)
    if sys.platform != "linux" or apart:
        yield
        return
    given = dict(os.environ)
    os.environ.clear()
    os.environ.update(inherited(given, PASSED_ON))
    forks = ForkServer.start((*LIBRARIES, *OF_THE_COMMAND), os.environ)
    forks.keep()
    yield
    own.set_link(None)
    forks.close()
    os.environ.update(given)


NEEDS_API: Final = {"api_server", "helm_program"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks for an API server or Helm needs one: `make test` leaves it to `make test-api`."""
    for item in items:
        if NEEDS_API & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.api)


@dataclass
class BareApiServer:
    """etcd and kube-apiserver as processes; requests are made with a token each."""

    assets: Path
    folder: Path
    port: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        etcd = f"http://127.0.0.1:{free_port()}"
        peers = f"http://127.0.0.1:{free_port()}"
        self.port = free_port()
        self._spawn("etcd", "--data-dir", self.folder / "etcd", "--unsafe-no-fsync", "--log-level=error",
                    f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
                    f"--listen-peer-urls={peers}")  # fmt: skip
        (self.folder / "tokens.csv").write_text("\n".join(TOKENS.values()) + "\n")
        key = self._service_account_key()
        self._spawn("kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=127.0.0.1",
                    # Else it looks for a way out, which a confined machine has none of.
                    "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
                    f"--secure-port={self.port}", "--cert-dir", self.folder / "certs",
                    "--token-auth-file", self.folder / "tokens.csv", "--authorization-mode=RBAC",
                    "--service-cluster-ip-range=10.0.0.0/16", "--service-account-issuer=https://kubernetes.default.svc",
                    "--service-account-key-file", key, "--service-account-signing-key-file", key,
                    # Where it is off, as by default, the server leaves such a source out before a policy sees it.
                    "--feature-gates=PodCertificateRequest=true",
                    "--runtime-config=certificates.k8s.io/v1beta1=true",
                    # There is no controller that would make the default account.
                    "--disable-admission-plugins=ServiceAccount")  # fmt: skip
        self._await_ready()

    def stop(self) -> None:
        """At once: nothing of it is to be kept, and an API server that is asked takes its time."""
        for process in self.processes:
            process.kill()
            process.wait()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        user: str = ADMIN,
        token: str = "",
        content: str = "application/json",
    ) -> tuple[int, Any]:
        """Status and decoded body of one request, by one of our users or by whoever has the token."""
        bearer = token or f"{user}-token"
        headers = {"Authorization": f"Bearer {bearer}", "Content-Type": content, "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=30, context=self._trust()) as answer:
                return answer.status, _decoded(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decoded(error.read())

    def kubeconfig(self, user: str = ADMIN, namespace: str = "default") -> Path:
        """A kubeconfig file of one user."""
        file = self.folder / f"{user}-{namespace}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "certs/apiserver.crt")}
        context = {"cluster": "bare", "user": user, "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bare",
            "clusters": [{"name": "bare", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": f"{user}-token"}}],
            "contexts": [{"name": "bare", "context": context}],
        }
        file.write_text(json.dumps(config))
        return file

    def kubectl(self, *args: str | Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
        """The real kubectl as the admin."""
        command = [self.assets / "kubectl", "--kubeconfig", self.kubeconfig(), *args]
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)

    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.folder / "certs/apiserver.crt"))

    def _spawn(self, program: str, *args: str | Path) -> None:
        # Not outliving even a killed pytest.
        with_parent_death_signal = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self.folder / f"{program}.log").open("wb") as log:
            command = [*with_parent_death_signal, self.assets / program, *args]
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))

    def _service_account_key(self) -> Path:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        file = self.folder / "service-accounts.pem"
        file.write_bytes(pem)
        return file

    def _await_ready(self) -> None:
        until = time.monotonic() + START_DEADLINE_S
        while True:
            ended = [process.args for process in self.processes if process.poll() is not None]
            assert not ended, f"ended at its start, see the logs in {self.folder}: {ended}"
            try:
                if self.request("GET", "/readyz")[0] == 200:
                    return
            except (OSError, ssl.SSLError):
                pass
            assert time.monotonic() < until, f"not ready within {START_DEADLINE_S} s, see the logs in {self.folder}"
            time.sleep(POLL_S)


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


def _lacking(what: str) -> NoReturn:
    """Who names a folder wants these tests to run."""
    if "KUBEBUILDER_ASSETS" in os.environ:
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def helm_program() -> str:
    """The real Helm's path."""
    found = shutil.which("helm", path=f"{os.environ['PATH']}:{os.environ.get('KUBEBUILDER_ASSETS', '')}")
    if found is None:
        _lacking("helm is neither on the PATH nor in KUBEBUILDER_ASSETS: the chart cannot be rendered")
    return found


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareApiServer]:
    """One for the whole session: tests keep to namespaces of their own."""
    assets = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
    missing = [name for name in ("etcd", "kube-apiserver", "kubectl") if not (assets / name).is_file()]
    if missing:
        _lacking(f"KUBEBUILDER_ASSETS={assets} holds no {', '.join(missing)}: a real API server is needed")
    server = BareApiServer(assets, tmp_path_factory.mktemp("api-server"))
    try:
        server.start()
        yield server
    finally:
        server.stop()
