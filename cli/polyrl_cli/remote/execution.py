"""A command run in a container of a pod, by the user's right to `pods/exec`: what it writes, as it comes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Final
from urllib.parse import urlencode

import aiohttp

from polyrl.errors import RunFailed, UserError
from polyrl_cli.remote.cluster import UserCluster
from polyrl_operator.api.kinds import POD

PROTOCOL: Final = "v4.channel.k8s.io"
"""Each message begins with a byte that says of which stream it is; understood by every API server since 1.4."""

OUT, ERR, END = 1, 2, 3
"""Streams: stdout, stderr, and how the command ended, a Status as JSON."""

SHOWN_STDERR: Final = 300
"""Characters of stderr's end that are shown."""


async def output_of(
    cluster: UserCluster, pod: str, container: str, command: Sequence[str]
) -> AsyncGenerator[bytes, None]:
    """The command's stdout. Raises UserError when the cluster refuses or the container is gone, RunFailed when the
    command did not end well."""
    query = [("container", container), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
    path = f"{POD.path(cluster.namespace, pod, 'exec')}?{urlencode(query)}"
    try:
        async with cluster.socket(path, PROTOCOL) as socket:
            async for part in _stdout(socket, f"{pod} {container}"):
                yield part
    except aiohttp.WSServerHandshakeError as error:
        raise UserError(_refusal(error.status, pod, container, cluster.namespace)) from None


async def _stdout(socket: aiohttp.ClientWebSocketResponse, where: str) -> AsyncGenerator[bytes, None]:
    streams: defaultdict[int, bytes] = defaultdict(bytes)
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        stream, data = message.data[0], message.data[1:]
        if stream == OUT:
            if data:
                yield data
            continue
        streams[stream] = (streams[stream] + data)[-MAX_KEPT_BYTES:]
        if stream == END:
            break
    try:
        end = json.loads(streams[END])
        reason = "" if end["status"] == "Success" else f": {end['message']}"
    except (ValueError, KeyError, TypeError):
        reason = ": the connection ended before the command"
    if reason:
        stderr = streams[ERR].decode(errors="replace").strip()[-SHOWN_STDERR:]
        raise RunFailed(f"{where}: the command did not end well{reason}{f': {stderr}' if stderr else ''}")


MAX_KEPT_BYTES: Final = 1 << 16
"""Bytes kept of stderr, and as many of the Status at the end."""


def _refusal(status: int, pod: str, container: str, namespace: str) -> str:
    if status == 403:
        return f"you may not run commands in pods of namespace {namespace}: it takes get and create of pods/exec"
    if status == 404:
        return f"{pod}: is gone meanwhile"
    return f"{pod} {container}: the cluster runs no command there now (status {status})"
