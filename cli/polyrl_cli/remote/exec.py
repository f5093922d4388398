"""Runs a command in a container by the API server's exec, and returns its first line; the command may go on."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
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

ANSWER_S: Final = 30.0
"""An interpreter that starts in a container with a tenth of a core takes several seconds."""

SHOWN_STDERR: Final = 300
"""Characters of stderr's end that are shown."""


async def first_line(cluster: UserCluster, pod: str, container: str, command: Sequence[str]) -> str:
    """The first line of the command's output, without the line's end.

    Raises UserError when the cluster refuses or the container is gone, RunFailed when no line comes.
    """
    query = [("container", container), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
    path = f"{POD.path(cluster.namespace, pod, 'exec')}?{urlencode(query)}"
    try:
        async with asyncio.timeout(ANSWER_S), cluster.socket(path, PROTOCOL) as socket:
            return await _read_line(socket, f"{pod} {container}")
    except aiohttp.WSServerHandshakeError as error:
        raise UserError(_refusal(error.status, pod, container, cluster.namespace)) from None
    except TimeoutError:
        raise RunFailed(f"{pod} {container}: no answer from inside within {ANSWER_S:g} s") from None


async def _read_line(socket: aiohttp.ClientWebSocketResponse, where: str) -> str:
    streams: defaultdict[int, bytes] = defaultdict(bytes)
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        streams[message.data[0]] += message.data[1:]
        if b"\n" in streams[OUT]:
            return streams[OUT].split(b"\n")[0].decode(errors="replace")
        if streams[END]:
            break
    try:
        reason = f": {json.loads(streams[END])['message']}"
    except (ValueError, KeyError, TypeError):
        reason = ""
    stderr = streams[ERR].decode(errors="replace").strip()[-SHOWN_STDERR:]
    raise RunFailed(f"{where}: the command said nothing{reason}{f': {stderr}' if stderr else ''}")


def _refusal(status: int, pod: str, container: str, namespace: str) -> str:
    if status == 403:
        return f"you may not run commands in pods of namespace {namespace}: it takes get and create of pods/exec"
    if status == 404:
        return f"{pod}: is gone meanwhile"
    return f"{pod} {container}: the cluster runs no command there now (status {status})"
