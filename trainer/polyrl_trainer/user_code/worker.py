"""`python -m polyrl_trainer.user_code.worker FD`: a process that calls one function of the user's, again and again.

The function runs in the main thread, so that signal.alarm works in it; no loop runs around a sync one, so that it may
call asyncio.run. Its deadline is kept from outside (see `pool`): nothing here can be trusted to end it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

import msgspec

from polyrl import parent_death_signal
from polyrl.errors import InvalidCode
from polyrl.sample import DiscardReason
from polyrl_trainer.user_code import messages
from polyrl_trainer.user_code.frames import describe
from polyrl_trainer.user_code.loading import load_function
from polyrl_trainer.user_code.messages import Answer, Call, CodeLoaded, Setup
from polyrl_trainer.user_code.verdicts import Reward, read_admission, read_reward

NICE: Final = 10
"""A tenth of a core beside a busy learner, which goes first; higher, and cheap rewards would miss their deadlines
beside local engines."""


def main() -> None:
    """Serves until the trainer closes its end, or kills."""
    parent_death_signal.hold()
    # The user's own children must not take the trainer for their parent.
    os.environ.pop(parent_death_signal.PARENT_PID, None)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    if isinstance(sys.stdout, TextIOWrapper):
        # A line and its end in one write: several processes print to one file.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    stream = connection.makefile("rb")
    setup = msgspec.msgpack.decode(_next_body(stream), type=Setup)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = setup.memory_bytes if most == resource.RLIM_INFINITY else min(most, setup.memory_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        function = load_function(setup.function, Path(setup.code_path))
    except InvalidCode as error:
        connection.sendall(messages.to_frame(CodeLoaded(invalid=str(error))))
        return
    os.nice(NICE)  # from here on: a replacement that loads beside busy engines is awaited by calls
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    connection.sendall(messages.to_frame(CodeLoaded(is_async=is_async)))
    if is_async:
        asyncio.run(_serve_async(connection, function, setup.whole_groups))
        return
    while body := _next_body(stream):
        call = msgspec.msgpack.decode(body, type=Call)
        connection.sendall(messages.to_frame(_answer(function, call, setup.whole_groups)))


def _next_body(stream: Any) -> bytes:
    header = stream.read(messages.HEADER_BYTES)
    return stream.read(messages.body_length(header)) if header else b""


def _answer(function: Callable[..., Any], call: Call, whole_groups: bool) -> Answer:
    try:
        return answer_of(function(argument_of(call, whole_groups)), function, call.id, whole_groups)
    except BaseException as error:  # noqa: BLE001 - SystemExit, and the verifiers' own kinds, are one sample's failure
        return Answer(call.id, reason=DiscardReason.REWARD_RAISED, detail=describe(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that it forgot would end the next call


async def _serve_async(connection: socket.socket, function: Callable[..., Any], whole_groups: bool) -> None:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    running = set()

    async def answer(call: Call) -> None:
        writer.write(messages.to_frame(await _answer_async(function, call, whole_groups)))

    while True:
        try:
            header = await reader.readexactly(messages.HEADER_BYTES)
            body = await reader.readexactly(messages.body_length(header))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        task = asyncio.create_task(answer(msgspec.msgpack.decode(body, type=Call)))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer_async(function: Callable[..., Any], call: Call, whole_groups: bool) -> Answer:
    deadline = asyncio.timeout(call.timeout_s)
    try:
        async with deadline:
            returned = await function(argument_of(call, whole_groups))
        return answer_of(returned, function, call.id, whole_groups)
    except BaseException as error:  # noqa: BLE001 - see `_answer`
        if deadline.expired():
            return Answer(call.id, reason=DiscardReason.REWARD_TIMED_OUT)
        return Answer(call.id, reason=DiscardReason.REWARD_RAISED, detail=describe(error))


def argument_of(call: Call, whole_groups: bool) -> Any:
    """The one argument of the user's function."""
    samples = [messages.from_wire(one) for one in call.samples]
    return samples if whole_groups else samples[0]


def answer_of(returned: object, function: Callable[..., Any], number: int, whole_groups: bool) -> Answer:
    """What the function returned, as plain data."""
    name = getattr(function, "__name__", "the reward")
    verdict = read_admission(returned) if whole_groups else read_reward(returned, name)
    if isinstance(verdict, Reward):
        return Answer(number, reward=verdict.value, metrics=verdict.metrics)
    return Answer(number) if verdict is None else Answer(number, reason=verdict.reason, detail=verdict.detail)


if __name__ == "__main__":
    main()
