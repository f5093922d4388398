"""What somebody else's model may take while it is read: seconds and bytes, by the size of its files.

A config that claims a billion layers is built layer by layer, and a chat template is a program: neither ends by itself,
and both fill the memory.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from polyrl.errors import UserError

LEAST_S: Final = 120.0
"""A tiny model takes seconds, and tens of them on a machine that is busy."""
BYTES_PER_S: Final = 20e6
"""Speed of a slow disk in the network."""
REMIND_S: Final = 1.0
"""Between two reminders: whoever reads may have taken the first for an error of his own."""
LEAST_BYTES: Final = 4 << 30
"""Beside what the process has already, weights excepted."""
COPIES: Final = 3
"""Memory for each byte of saved weights: in float32 what is saved in half of it, and a part on its way."""
MAX_MEMORY_SHARE: Final = 0.9
"""Share of the machine's memory that may be used; beyond it the system ends any process."""


class _TooLongError(Exception):
    pass


@contextmanager
def within_bounds(folder: Path) -> Iterator[None]:
    """Memory beyond the bounds is an error wherever it is asked for, and time wherever Python is by then. Raises
    UserError. For the main thread."""
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    seconds = LEAST_S + size / BYTES_PER_S

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise _TooLongError(f"not read within {seconds:.0f} s, which is long for {size:,} bytes")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_DATA, (_smaller(_memory(size), soft), hard))
    others = signal.setitimer(signal.ITIMER_REAL, seconds, REMIND_S)
    try:
        yield
    except _TooLongError as error:
        raise UserError(f"{folder}: {error}") from None
    except MemoryError:
        raise UserError(f"{folder}: takes more memory than {size:,} bytes of files explain") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _memory(size: int) -> int:
    """Bytes of data that this process may have, stacks of its threads included."""
    import psutil  # not installed where only runs are read

    has: int = getattr(psutil.Process().memory_info(), "data", 0)  # Linux knows it
    return has + min(LEAST_BYTES + COPIES * size, int(MAX_MEMORY_SHARE * psutil.virtual_memory().total))


def _smaller(limit: int, other: int) -> int:
    return limit if other == resource.RLIM_INFINITY else min(limit, other)
