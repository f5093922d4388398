"""The cluster that the user's kubeconfig and flags name; what goes wrong there as one sentence."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from polyrl.cluster.actions import Object
from polyrl.errors import UserError
from polyrl_operator.api.client import SILENCE_S, ApiError, Client, follow, refusal
from polyrl_operator.api.connect import stream_session
from polyrl_operator.api.kinds import JOB, ResourceKind

FIELD_MANAGER: Final = "polyrl"
"""Owner of what a person applies; the operator is another, so neither takes the other's fields."""

CLOSE_S: Final = 1.0
"""Longest wait for the other side to close a WebSocket."""

GONE: Final = "DELETED"


@dataclass(frozen=True)
class ClusterOptions:
    """Flags of the command line; None: as the kubeconfig says."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


class UserCluster:
    """Objects, watches, logs and WebSockets in one namespace."""

    def __init__(self, client: Client, session: aiohttp.ClientSession, host: str, namespace: str) -> None:
        self.client, self.namespace, self.host = client, namespace, host
        self._session = session

    async def job(self, name: str) -> Object:
        """The job as stored. Raises UserError when there is none, or no PolyRLJob at all."""
        stored = await self.client.get(JOB, self.namespace, name)
        if stored is None:
            await self.require_crd()
            raise UserError(f"there is no PolyRLJob {name} in namespace {self.namespace}")
        return stored

    async def require_crd(self) -> None:
        """Raises UserError when the cluster does not know PolyRLJob."""
        if not await self.client.discover(JOB):
            raise UserError(
                f"the cluster at {self.host} has no PolyRLJob: install the operator first"
                " (helm install polyrl charts/polyrl)"
            )

    def changes(
        self, kind: ResourceKind, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[tuple[str, list[Object]]]:
        """What there is (`LIST`), then every change by its type. See `follow`."""
        return follow(self.client, self._session, kind, self.namespace, label_selector, field_selector)

    async def lines(self, url: str) -> AsyncIterator[bytes]:
        """A stream's lines, each as it comes. Raises ApiError on a refusal."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
        async with self._session.get(url, timeout=timeout) as answer:
            if answer.status >= 400:
                raise refusal(answer.status, await answer.read())
            async for line in answer.content:
                yield line

    @asynccontextmanager
    async def socket(self, path: str, protocol: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket that the server opens at `path`. Raises WSServerHandshakeError when it does not."""
        timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
        async with self._session.ws_connect(self.host + path, protocols=(protocol,), timeout=timeout) as socket:
            yield socket

    def log_url(self, pod: str, container: str, follow: bool) -> str:
        """Where a container's log is read."""
        query = {"container": container} | ({"follow": "true"} if follow else {})
        return f"{self.host}/api/v1/namespaces/{self.namespace}/pods/{pod}/log?{urlencode(query)}"


@asynccontextmanager
async def user_cluster(options: ClusterOptions, namespace: str | None = None) -> AsyncIterator[UserCluster]:
    """The cluster that the flags name; `namespace` is used where they name none. Raises UserError for what the cluster
    refuses, and when there is none."""
    configuration, own = await _configuration(options)
    chosen = options.namespace or namespace or own
    async with ApiClient(configuration) as api, stream_session(configuration) as session:
        client = Client(api, field_manager=FIELD_MANAGER)
        try:
            yield UserCluster(client, session, str(configuration.host), chosen)
        except ApiError as error:
            _refused(error, str(configuration.host))
        except aiohttp.ClientError as error:
            raise UserError(f"no cluster answers at {configuration.host}: {error}") from None


async def _configuration(options: ClusterOptions) -> tuple[Configuration, str]:
    configuration = Configuration()
    file = str(options.kubeconfig) if options.kubeconfig else None
    _require_kubeconfig(file)
    try:
        known, current = config.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
        contexts = {one["name"]: one["context"] for one in known}
        chosen = contexts.get(options.context) if options.context else current["context"]
        if chosen is None:
            raise UserError(f"--context {options.context}: the kubeconfig has only {', '.join(sorted(contexts))}")
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=file, context=options.context, client_configuration=configuration, persist_config=False
        )
    except (config.ConfigException, OSError) as error:
        raise UserError(f"no way to reach a cluster: {error} (see --kubeconfig and --context)") from None
    return configuration, chosen.get("namespace") or "default"


def _require_kubeconfig(file: str | None) -> None:
    tried = (file or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")).split(os.pathsep)
    if not any(Path(one).is_file() for one in tried):
        raise UserError(f"no way to reach a cluster: there is no kubeconfig {' or '.join(tried)} (see --kubeconfig)")


def _refused(error: ApiError, host: str) -> NoReturn:
    if error.status == 0:
        raise UserError(f"no cluster answers at {host}: {error}") from None
    if error.status == 401:
        raise UserError(f"the cluster at {host} does not know you; log in anew or choose another --context") from None
    raise UserError(str(error)) from None
