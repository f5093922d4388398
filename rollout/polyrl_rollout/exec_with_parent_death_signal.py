"""Becomes CMD, which then ends when its parent ends, however that ends.

    python -m polyrl_rollout.exec_with_parent_death_signal -- CMD ARGS...

For programs that do not set a parent death signal themselves; the kernel keeps it over exec, but not for grandchildren.
The parent gives its process id in `polyrl.parent_death_signal.PARENT_PID`.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from polyrl import parent_death_signal

EXIT_NOT_FOUND: Final = 127
"""What a shell exits with when there is no such program."""


def main(argv: list[str]) -> None:
    """`-- CMD ARGS...`. Exits 1 without a command, EXIT_NOT_FOUND when CMD cannot be started."""
    if len(argv) < 2 or argv[0] != "--":
        sys.exit("usage: python -m polyrl_rollout.exec_with_parent_death_signal -- CMD [ARGS...]")
    parent_death_signal.hold()
    # CMD is the parent of its own children: a value meant for us would end them.
    os.environ.pop(parent_death_signal.PARENT_PID, None)
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        print(f"{argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
