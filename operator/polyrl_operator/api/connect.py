"""How the operator reaches the API server: inside a pod by its service account, elsewhere by a kubeconfig.

One configuration serves both clients: ours (`client`) and kopf's, which gets a session of its own, so that a stream
that hangs never holds a connection that an action needs.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from yarl import URL

from polyrl.errors import UserError

CONNECTIONS: Final = 64
"""To the API server at a time, ours without kopf's: more than workers that act at once."""

MAX_BODY: Final = 32 << 20
"""Bytes of a whole answer: ten times what a page of pods has, and more than any one object, of which the API server
stores 1.5 MiB, and escapes a byte by six at most."""


class OversizedAnswer(aiohttp.ClientPayloadError):
    """More than MAX_BODY: a page of a list has to be asked for with fewer objects."""


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """The API server's address and our credentials. Raises UserError when there are none."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = CONNECTIONS
    # Else every request reads the environment and ~/.netrc in a thread: half of the operator's time.
    configuration.client_session_kwargs = {"trust_env": False}
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=str(kubeconfig) if kubeconfig else None,
                client_configuration=configuration,
                persist_config=False,
            )
    except (config.ConfigException, OSError) as error:
        raise UserError(f"--kubeconfig: no way to reach a cluster: {error}") from None
    configuration.client_session_kwargs["middlewares"] = (_only_at(URL(configuration.host).origin()), _bound)
    return configuration


def _only_at(origin: URL) -> aiohttp.ClientMiddlewareType:
    """What we write, Secrets among it, would go on to wherever a redirect leads."""

    async def refuse_elsewhere(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if request.url.origin() != origin:
            raise aiohttp.ClientError(f"it redirects to {request.url.origin()}")
        return await handler(request)

    return refuse_elsewhere


async def _bound(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    response = await handler(request)
    response.content = cast(aiohttp.StreamReader, _BoundedBody(response.content))
    return response


class _BoundedBody:
    """A response's content, of which no more is read at once than an answer has."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._content.__aiter__()

    async def read(self) -> bytes:
        """All of it. Raises OversizedAnswer, and ClientPayloadError for one that breaks off."""
        data = bytearray()
        async for part in self._content.iter_any():
            data += part
            if len(data) > MAX_BODY:
                raise OversizedAnswer(f"it sends more than {MAX_BODY:,} bytes")
        return bytes(data)


def stream_session(
    configuration: Configuration,
    *middlewares: aiohttp.ClientMiddlewareType,
    trace_configs: list[aiohttp.TraceConfig] | None = None,
) -> aiohttp.ClientSession:
    """A session of its own for long streams, with fresh credentials on every request."""

    origin = URL(configuration.host).origin()

    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        # Asked for every hop of a redirect anew: the token is for the API server alone.
        if request.url.origin() != origin:
            return await handler(request)
        token = await configuration.get_api_key_with_prefix("BearerToken")
        if token:
            request.headers["Authorization"] = token
        return await handler(request)

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=_tls(configuration)),
        trace_configs=trace_configs,
        middlewares=(authorize, *middlewares, _bound),
        read_bufsize=1 << 20,
        trust_env=False,
    )


def _tls(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
