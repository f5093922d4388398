"""Runs a command in a container by the API server's exec, and hears its first line.

The command is not awaited: it may go on when this has gone.
Refuses to hold: what is run (see `pod_drill`). Read next: `user_cluster`.
"""

from __future__ import annotations

import asyncio
import json
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

LAST_WORDS: Final = 300
"""Characters of stderr that are shown."""


async def first_line(cluster: UserCluster, pod: str, container: str, command: Sequence[str]) -> str:
    """What the command says first, without the line's end.

    Raises UserError when the cluster refuses or the container is gone, RunFailed when no line comes.
    """
    query = [("container", container), ("stdout", "true"), ("stderr", "true"), *(("command", one) for one in command)]
    path = f"{POD.path(cluster.namespace, pod, 'exec')}?{urlencode(query)}"
    try:
        async with asyncio.timeout(ANSWER_S), cluster.socket(path, PROTOCOL) as socket:
            return await _hear(socket, f"{pod} {container}")
    except aiohttp.WSServerHandshakeError as error:
        raise UserError(_refusal(error.status, pod, container, cluster.namespace)) from None
    except TimeoutError:
        raise RunFailed(f"{pod} {container}: no answer from inside within {ANSWER_S:g} s") from None


async def _hear(socket: aiohttp.ClientWebSocketResponse, where: str) -> str:
    heard = {OUT: b"", ERR: b"", END: b""}
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        stream = message.data[0]
        heard[stream] = heard.get(stream, b"") + message.data[1:]
        if b"\n" in heard[OUT]:
            return heard[OUT].split(b"\n")[0].decode(errors="replace")
        if heard[END]:
            break
    raise RunFailed(f"{where}: the command said nothing{_reason(heard[END])}{_last_words(heard[ERR])}")


def _reason(end: bytes) -> str:
    try:
        return f": {json.loads(end)['message']}"
    except (ValueError, KeyError, TypeError):
        return ""


def _last_words(said: bytes) -> str:
    text = said.decode(errors="replace").strip()[-LAST_WORDS:]
    return f": {text}" if text else ""


def _refusal(status: int, pod: str, container: str, namespace: str) -> str:
    if status == 403:
        return f"you may not run commands in pods of namespace {namespace}: it takes get and create of pods/exec"
    if status == 404:
        return f"{pod}: is gone meanwhile"
    return f"{pod} {container}: the cluster runs no command there now (status {status})"
