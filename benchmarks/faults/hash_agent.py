"""The rollout agent and its embedded engine's port, unchanged, over a process without a model (see `hash_engine`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from unittest.mock import patch

import typer

from polyrl_rollout.agent import __main__ as agent
from polyrl_rollout.engines.child import ChildProcess
from polyrl_rollout.engines.embedded import engine

ENGINE: Final = Path(__file__).with_name("hash_engine.py")
SCRIPT: Final = (sys.executable, "-m", "polyrl.testing.script")


class HashChild(ChildProcess):
    """The embedded engine's process is another program; how it is started and ended stays."""

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        *,
        starts_others: bool = True,
    ) -> ChildProcess:
        program = [*SCRIPT, str(ENGINE), command[-1]]
        return await ChildProcess.start(program, environment, pass_fds, starts_others=starts_others)


if __name__ == "__main__":
    with patch.object(engine, "ChildProcess", HashChild):
        typer.run(agent.main)
