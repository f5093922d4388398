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
from io import BufferedWriter, TextIOWrapper


@contextmanager
def loading() -> Iterator[None]:
    """What is imported inside is not looked at by the garbage collector, then or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_code: list[int] = []
"""What this process ends with, once that is known."""
_unwritten: list[OSError] = []
"""Why output was not written."""


@contextmanager
def prompt_exit() -> Iterator[None]:
    """The process ends as what runs inside does, and where Python would begin to take its modules apart: threads are
    over and exit handlers were called. This module is to be imported before the libraries, also where the process was
    forked from, since exit handlers are called from the last to the first."""
    try:
        yield
        _code.append(0)
    except SystemExit as end:
        _code.append(0 if end.code is None else end.code if isinstance(end.code, int) else 1)
        raise
    except Exception:
        _code.append(1)
        raise


@atexit.register
def _end() -> None:
    if _code:
        written = flushed() and not _unwritten
        os._exit(_code[-1] if written or _code[-1] else 1)


def unwritten(error: OSError) -> None:
    """A disk refused what was printed. That is said, nothing more is printed, what is under way goes on, and the
    process makes no success of it."""
    _report(error)
    _unwritten.append(error)
    drop_output()


def drop_output() -> None:
    """Nobody gets what is printed from now on, or what still waits in a buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: OSError) -> None:
    with suppress(OSError, ValueError):
        print(f"not all of the output was written: {error}", file=sys.stderr, flush=True)


def flushed() -> bool:
    """Writes out what was printed, and what user code has left open. False when a disk refused what was printed, which
    is reported; a reader who is gone, or has closed the stream, wanted no more of it."""
    for file in [one for one in gc.get_objects() if type(one) in (TextIOWrapper, BufferedWriter)]:
        with suppress(OSError, ValueError):
            if os.path.isfile(file.fileno()):  # a pipe may make its writer wait
                file.flush()
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError, ValueError):
                stream.flush()
    except OSError as error:
        _report(error)
        return False
    return True
