"""`python -m polyrl_trainer.user_code.workers.worker SOCKET MEMORY`: a process that calls the user's code, again and
again.

A function runs in the main thread, so that signal.alarm works in it; no loop runs around a sync one, so that it may
call asyncio.run. Its deadline is kept from outside (see `pool`): nothing here can be trusted to end it. Environments
run on a loop in the main thread (see `conversations`).
"""

from __future__ import annotations

import asyncio
import inspect
import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable, Coroutine
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

import msgspec

from polyrl import parent_death_signal
from polyrl.errors import InvalidCode
from polyrl.sample import DiscardReason
from polyrl_trainer.user_code.episodes import EpisodeFailed
from polyrl_trainer.user_code.frames import describe
from polyrl_trainer.user_code.loading import load_environment, load_function
from polyrl_trainer.user_code.verdicts import Reward, Verdict, read_admission, read_reward, read_rewards
from polyrl_trainer.user_code.workers import messages, thread_use
from polyrl_trainer.user_code.workers.conversations import LocalConversations
from polyrl_trainer.user_code.workers.forks import forked_children_end
from polyrl_trainer.user_code.workers.messages import Answer, Call, CodeLoaded, Ended, Outcome, Serves, Setup, Turn
from polyrl_trainer.user_code.workers.thread_use import ThreadUse

NICE: Final = 10
"""A tenth of a core beside a busy learner, which goes first; higher, and cheap rewards would miss their deadlines
beside local engines."""
TURNS_S: Final = 0.1
"""Between two signs that a loop turns; deadlines are seconds."""


def main() -> None:
    """Serves until the trainer closes its end, or kills."""
    parent_death_signal.hold()
    # The user's own children must not take the trainer for their parent.
    os.environ.pop(parent_death_signal.PARENT_PID, None)
    connection, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    connection.set_inheritable(False)
    thread = ThreadUse(mmap.mmap(memory, thread_use.SHARED_BYTES))
    os.close(memory)
    if isinstance(sys.stdout, TextIOWrapper):
        # A line and its end in one write: several processes print to one file.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    stream = connection.makefile("rb")
    setup = msgspec.msgpack.decode(_next_body(stream), type=Setup)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = setup.memory_bytes if most == resource.RLIM_INFINITY else min(most, setup.memory_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        _load_and_serve(connection, stream, setup, thread=thread)
    except InvalidCode as error:
        connection.sendall(messages.to_frame(CodeLoaded(invalid=str(error))))


def _load_and_serve(connection: socket.socket, stream: Any, setup: Setup, *, thread: ThreadUse) -> None:
    """Raises InvalidCode before anything is served."""
    if setup.serves is Serves.ENVIRONMENT:
        environment = load_environment(setup.function, Path(setup.code_path))
        _is_loaded(connection, is_async=True)
        asyncio.run(_converse(connection, LocalConversations(environment, setup.timeout_s, thread=thread)))
        return
    function = load_function(setup.function, Path(setup.code_path))
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    _is_loaded(connection, is_async=is_async)
    if is_async:
        asyncio.run(_serve_async(connection, function, setup.serves, thread=thread))
        return
    while body := _next_body(stream):
        call = msgspec.msgpack.decode(body, type=Call)
        connection.sendall(messages.to_frame(_answer(function, call, setup.serves)))


def _is_loaded(connection: socket.socket, *, is_async: bool) -> None:
    os.nice(NICE)  # from here on: a replacement that loads beside busy engines is awaited by calls
    connection.sendall(messages.to_frame(CodeLoaded(is_async=is_async)))


def _next_body(stream: Any) -> bytes:
    header = stream.read(messages.HEADER_BYTES)
    return stream.read(messages.body_length(header)) if header else b""


def _answer(function: Callable[..., Any], call: Call, serves: Serves) -> Answer:
    try:
        with forked_children_end():
            returned = function(argument_of(call, serves))
        return answer_of(returned, function, call, serves)
    except BaseException as error:  # noqa: BLE001 - SystemExit, and the verifiers' own kinds, are one sample's failure
        return _failed(call, DiscardReason.REWARD_RAISED, describe(error))
    finally:
        thread_use.disarm()


async def _serve_async(
    connection: socket.socket, function: Callable[..., Any], serves: Serves, *, thread: ThreadUse
) -> None:
    async def answer(body: bytes) -> Answer:
        return await _answer_async(function, msgspec.msgpack.decode(body, type=Call), serves, thread=thread)

    asyncio.get_running_loop().set_task_factory(thread.task)
    await _answer_all(connection, answer)


async def _answer_all(connection: socket.socket, answer: Callable[[bytes], Coroutine[Any, Any, Answer | None]]) -> None:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    running = set()

    async def write(body: bytes) -> None:
        answered = await answer(body)
        if answered is not None:
            writer.write(messages.to_frame(answered))

    while True:
        try:
            body = await messages.next_body(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        task = asyncio.create_task(write(body))
        running.add(task)
        task.add_done_callback(running.discard)


async def _converse(connection: socket.socket, conversations: LocalConversations) -> None:
    async def answer(body: bytes) -> Answer | None:
        message = msgspec.msgpack.decode(body, type=Turn | Ended)
        if isinstance(message, Ended):
            conversations.end(message.id)
            return None
        name = message.sample.id
        try:
            move = await conversations.next_move(messages.from_wire(message.sample), begins=message.begins)
        except EpisodeFailed as failed:
            return Answer(name, (Outcome(reason=failed.reason, detail=failed.detail),))
        return Answer(name, (Outcome(text=move.text, reward=move.reward, truncated=move.truncated),))

    asyncio.get_running_loop().set_task_factory(conversations.thread.task)
    turning = asyncio.create_task(_show_that_it_turns(conversations.thread))
    await _answer_all(connection, answer)
    turning.cancel()


async def _show_that_it_turns(thread: ThreadUse) -> None:
    while True:
        thread.write()
        await asyncio.sleep(TURNS_S)


async def _answer_async(function: Callable[..., Any], call: Call, serves: Serves, *, thread: ThreadUse) -> Answer:
    async def returns() -> Any:
        return await function(argument_of(call, serves))

    deadline = asyncio.timeout(call.timeout_s)
    try:
        with forked_children_end():
            async with deadline:
                returned = await thread.call(call.id, returns())
        return answer_of(returned, function, call, serves)
    except BaseException as error:  # noqa: BLE001 - see `_answer`
        if deadline.expired():
            return _failed(call, DiscardReason.REWARD_TIMED_OUT)
        return _failed(call, DiscardReason.REWARD_RAISED, describe(error))


def _failed(call: Call, reason: DiscardReason, detail: str = "") -> Answer:
    return Answer(call.id, (Outcome(reason=reason, detail=detail),) * len(call.samples))


def argument_of(call: Call, serves: Serves) -> Any:
    """The one argument of the user's function."""
    samples = [messages.from_wire(one) for one in call.samples]
    return samples[0] if serves is Serves.REWARD else samples


def answer_of(returned: object, function: Callable[..., Any], call: Call, serves: Serves) -> Answer:
    """What the function returned, as plain data."""
    name = getattr(function, "__name__", "the reward")
    if serves is Serves.FILTER:
        return Answer(call.id, (_outcome(read_admission(returned)),))
    verdicts = [read_reward(returned, name)]
    if serves is not Serves.REWARD:
        verdicts = read_rewards(returned, len(call.samples), function=name)
    return Answer(call.id, tuple(map(_outcome, verdicts)))


def _outcome(verdict: Verdict | None) -> Outcome:
    if isinstance(verdict, Reward):
        return Outcome(reward=verdict.value, metrics=verdict.metrics)
    return Outcome() if verdict is None else Outcome(reason=verdict.reason, detail=verdict.detail)


if __name__ == "__main__":
    main()
