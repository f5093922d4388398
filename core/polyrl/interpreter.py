"""What Python spends on its own objects in a process that loads large libraries, and how processes are spared it.

torch and transformers make a million objects that live as long as the process. Of the 5 CPU seconds of a trainer that
loads them and ends, 0.7 go to the garbage collector, which finds nothing, and 1 to taking apart what the kernel frees.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def loading() -> Iterator[None]:
    """What is imported inside is not looked at by the garbage collector, then or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class PromptExit:
    """Ends the process where Python would begin to take its modules apart: threads are over and exit handlers were
    called. To be made before the libraries are loaded, since exit handlers are called from the last to the first."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._end)

    def set_code(self, code: int) -> None:
        """What the process ends with. Without it Python ends as ever, so that no failure becomes a success."""
        self._code = code

    def _end(self) -> None:
        if self._code is None:
            return
        os._exit(self._code if flushed() or self._code else 1)


def flushed() -> bool:
    """Writes out what was printed. False when a disk refused it, which is reported; a reader who is gone, or has closed
    the stream, wanted no more of it."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError, ValueError):
                stream.flush()
    except OSError as error:
        with suppress(OSError, ValueError):
            print(f"not all of the output was written: {error}", file=sys.stderr, flush=True)
        return False
    return True
