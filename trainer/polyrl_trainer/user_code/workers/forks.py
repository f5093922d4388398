"""A child that user code forks: it comes out of the user's function as its parent does, and would answer in its place.

So it ends there, with the exit status that any script would have.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def forked_children_end() -> Iterator[None]:
    """Around a call of the user's code: its own process comes out of it, and no other."""
    own, status = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        status = _exit_status(error)
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
    finally:
        if os.getpid() != own:
            sys.stdout.flush()
            os._exit(status)


def _exit_status(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)
