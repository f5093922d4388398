"""The runner's control socket: a Unix socket in the run's folder, through which `polyrl chaos` asks for a fault.

One JSON line in (`FaultRequest`), one JSON line out (`ControlAnswer`), then the connection ends. Only the folder's
owner can connect: the socket's mode is 0600 before it listens.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from polyrl.errors import UserError
from polyrl_cli.chaos.faults import FaultRequest
from polyrl_cli.local.run_folder import RunFolder

MAX_LINE_BYTES: Final = 64 << 10
"""A request takes two hundred bytes."""

REQUEST_S: Final = 5.0
"""Longest wait for the line of a client that has connected."""

ANSWER_S: Final = 20.0
"""Longest wait for the runner's answer: it waits up to 10 s for the kernel to reap what it killed."""

RequestHandler = Callable[[FaultRequest], Awaitable[str]]


class ControlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, or why nothing was."""

    done: str = ""
    refused: str = ""


@asynccontextmanager
async def listening(path: Path, handler: RequestHandler) -> AsyncIterator[None]:
    """Answers requests at `path` while the context lasts. Raises UserError when the folder takes no socket."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(msgspec.json.encode(await _answer(reader, handler)) + b"\n")
            await writer.drain()
        except ConnectionError:
            return  # whoever asked has left
        finally:
            writer.close()

    with _bound(path) as listener:
        server = await asyncio.start_unix_server(serve, sock=listener, limit=MAX_LINE_BYTES)
        try:
            yield
        finally:
            server.close()


@contextmanager
def _bound(path: Path) -> Iterator[socket.socket]:
    with _address(path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            path.unlink(missing_ok=True)
            listener.bind(address)
            path.chmod(0o600)
        except OSError as error:
            raise UserError(f"{path}: cannot make the runner's socket: {error.strerror}") from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def ask_run(folder: RunFolder, request: FaultRequest) -> str:
    """What the runner of this folder has done. Raises UserError when nothing was done."""
    return f"{folder.root}: {asyncio.run(ask_runner(folder.control, request))}"


async def ask_runner(path: Path, request: FaultRequest) -> str:
    """What the runner has done. Raises UserError when it refuses, or when nobody listens at `path`."""
    try:
        async with asyncio.timeout(ANSWER_S):
            with _address(path) as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=MAX_LINE_BYTES)
            try:
                writer.write(msgspec.json.encode(request) + b"\n")
                answer = msgspec.json.decode(await reader.readline(), type=ControlAnswer)
            finally:
                writer.close()
    except TimeoutError:
        raise UserError(f"{path}: the runner gave no answer within {ANSWER_S:g} s") from None
    except (OSError, ValueError):
        raise UserError(
            f"{path.parent.parent}: no `polyrl run` is at work there, so nothing can be done to it"
        ) from None
    if answer.refused:
        raise UserError(answer.refused)
    return answer.done


async def _answer(reader: asyncio.StreamReader, handler: RequestHandler) -> ControlAnswer:
    try:
        async with asyncio.timeout(REQUEST_S):
            line = await reader.readline()
        return ControlAnswer(done=await handler(msgspec.json.decode(line, type=FaultRequest)))
    except (TimeoutError, ValueError) as error:
        return ControlAnswer(refused=f"the runner does not understand the request: {error or 'no line came'}")
    except UserError as error:
        return ControlAnswer(refused=str(error))


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """`path` in a form short enough for a Unix socket, which takes 107 bytes; valid while the context lasts."""
    if sys.platform != "linux":
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
