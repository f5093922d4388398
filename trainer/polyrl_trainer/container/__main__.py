"""`python -m polyrl_trainer.container`: a trainer and its reserved engines in one container; see `command`.

Ends with the trainer's exit status, or with 2 and a sentence when its own command line is wrong.
"""

from __future__ import annotations

import signal

# Before all else: process 1 of a container has no default for a signal, so one that came during the imports was lost,
# and the pod learned on until it was killed.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

import asyncio  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

from polyrl import interpreter, parent_death_signal  # noqa: E402
from polyrl.errors import UserError  # noqa: E402
from polyrl.worker import USER_ERROR_EXIT  # noqa: E402
from polyrl_trainer.container.command import parse_command  # noqa: E402
from polyrl_trainer.container.processes import run_container  # noqa: E402


def main(argv: list[str]) -> int:
    """Runs the container's processes."""
    parent_death_signal.hold()
    try:
        command = parse_command(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR_EXIT
    return asyncio.run(run_container(command, os.environ))


if __name__ == "__main__":
    with interpreter.prompt_exit():  # whoever read the log may have gone away, which is no failure
        sys.exit(main(sys.argv[1:]))
