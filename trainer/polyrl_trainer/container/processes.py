"""The processes of a trainer's container: a trainer that is waited for, agents that are kept, labelled and ended.

The kernel ends them all with this one (`parent_death_signal`). SIGTERM is for the trainer: it finishes its
mini-batch and saves, while its engines go on; when it has ended they have AGENTS_END_S to take their leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from polyrl import parent_death_signal
from polyrl_trainer.container.command import ContainerCommand, Restarts, exit_status

AGENTS_END_S: Final = 5.0
"""For agents whose trainer has ended; a pod's grace holds it."""
REST_S: Final = 1.0
"""For the last lines of an agent that has ended, which its engine's processes may hold open."""
REAP_EVERY_S: Final = 0.5
"""Nothing says whose a process was that fell to us, but that nobody waits for it."""
LONGEST_LINE: Final = 65536
STOPS: Final = (signal.SIGTERM, signal.SIGINT)


async def run_container(command: ContainerCommand, environ: Mapping[str, str]) -> int:
    """Runs the trainer to its end, engines beside it; returns the container's exit status."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in STOPS:
        loop.add_signal_handler(number, asked.set)
    # Blocked since the first line of this process; what came meanwhile comes now. Children begin with what is here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    trainer = await _start(command.trainer, environ)
    async with asyncio.TaskGroup() as group:
        beside = [group.create_task(_pass_on(asked, trainer))]
        beside += [group.create_task(_keep(command, number, environ)) for number in range(command.engines)]
        beside += [group.create_task(_reap())] if os.getpid() == 1 else []
        code = await trainer.wait()
        for task in beside:
            task.cancel()
    return exit_status(code)


async def _pass_on(asked: asyncio.Event, trainer: asyncio.subprocess.Process) -> None:
    await asked.wait()
    with contextlib.suppress(ProcessLookupError):
        trainer.send_signal(signal.SIGTERM)


async def _keep(command: ContainerCommand, number: int, environ: Mapping[str, str]) -> None:
    """Starts the agent of engine `number` again and again, until cancelled."""
    label, restarts = f"[reserved {number}] ", Restarts()
    while True:
        began = time.monotonic()
        how = await _run_agent(command.agent_command(number), command.agent_environment(number, environ), label)
        restarts = restarts.after(time.monotonic() - began)
        _print(f"{label}{how}; started again in {restarts.pause_s:g} s\n".encode())
        await asyncio.sleep(restarts.pause_s)


async def _reap() -> None:
    """Waits for processes whose parents have ended, as an engine's do when their agent is killed: they fall to process
    1, and each would keep its number."""
    seen = 0
    while True:
        await asyncio.sleep(REAP_EVERY_S)
        seen = _wait_for_stray(seen)


def _wait_for_stray(seen: int) -> int:
    """Our own are waited for at once, so who is dead at two looks is none of them; returns who is dead now."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None and found.si_pid == seen:
            os.waitpid(seen, 0)
        elif found is not None:
            return found.si_pid
    return 0


async def _run_agent(argv: Sequence[str], environ: Mapping[str, str], label: str) -> str:
    """Runs one agent to its end, and ends it when cancelled; returns how it ended."""
    try:
        agent = await _start(argv, environ, piped=True)
    except OSError as error:
        return f"cannot be started: {error}"
    lines = asyncio.create_task(_label(agent, label.encode()))
    try:
        return f"ended with exit status {exit_status(await agent.wait())}"
    finally:
        await _end(agent)
        await asyncio.wait([lines], timeout=REST_S)
        lines.cancel()


async def _start(argv: Sequence[str], environ: Mapping[str, str], *, piped: bool = False) -> asyncio.subprocess.Process:
    """A process that ends with this one."""
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if piped else None,
        stderr=asyncio.subprocess.STDOUT if piped else None,
        env={**environ, parent_death_signal.PARENT_PID: str(os.getpid())},
    )


async def _end(agent: asyncio.subprocess.Process) -> None:
    """Asks it to end, and ends it; fine when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        agent.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(AGENTS_END_S):
            await agent.wait()
    with contextlib.suppress(ProcessLookupError):
        agent.kill()
    await agent.wait()


async def _label(agent: asyncio.subprocess.Process, label: bytes) -> None:
    assert agent.stdout is not None
    rest = b""
    while read := await agent.stdout.read(LONGEST_LINE):
        *whole, rest = (rest + read).split(b"\n")
        _print(b"".join(label + line + b"\n" for line in whole))
        if len(rest) > LONGEST_LINE:
            rest = _print(label + rest + b"\n")
    if rest:
        _print(label + rest + b"\n")


def _print(lines: bytes) -> bytes:
    # Whoever reads the log may go away; the trainer goes on.
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(lines)
        sys.stderr.buffer.flush()
    return b""
