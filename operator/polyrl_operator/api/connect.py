"""How the operator reaches the API server: inside a pod by its service account, elsewhere by a kubeconfig.

One configuration serves both clients: ours (`client`) and kopf's, which gets a session of its own, so that a stream
that hangs never holds a connection that an action needs.
Refuses to hold: requests. Read next: `client`, `requests`.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final, cast

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

from polyrl.errors import UserError
from polyrl_operator.api.line_framing import WholeLines

CONNECTIONS: Final = 64
"""To the API server at a time, ours without kopf's: more than workers that act at once."""

CONNECT_S: Final = 5.0
"""Until a connection stands; a server that is away is tried again rather than waited for."""


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
    return configuration


def watch_session(configuration: Configuration, traces: list[aiohttp.TraceConfig]) -> aiohttp.ClientSession:
    """An own session for long streams, with fresh credentials on every request; watches give whole lines."""

    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        token = await configuration.get_api_key_with_prefix("BearerToken")
        if token:
            request.headers["Authorization"] = token
        return await handler(request)

    connector = aiohttp.TCPConnector(limit=0, ssl=_tls(configuration))
    return aiohttp.ClientSession(
        connector=connector,
        trace_configs=traces,
        middlewares=(authorize, _whole_lines),
        read_bufsize=1 << 20,
        trust_env=False,
    )


async def _whole_lines(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    response = await handler(request)
    if "watch" in request.url.query and response.status == 200:
        response.content = cast(aiohttp.StreamReader, WholeLines(response.content))
    return response


def _tls(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
