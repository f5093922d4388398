"""`python -m polyrl_trainer.container`: a trainer and its reserved engines in one container; see `command`.

Ends with the trainer's exit status, or with 2 and a sentence when its own command line is wrong.
"""

from __future__ import annotations

import asyncio
import os
import sys

from polyrl import parent_death_signal
from polyrl.errors import UserError
from polyrl.worker import USER_ERROR_EXIT
from polyrl_trainer.container.command import parse_command
from polyrl_trainer.container.processes import run_container


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
    sys.exit(main(sys.argv[1:]))
