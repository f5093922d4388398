"""What the user's own code printed, as it comes: the reward's and the environment's `print()`, for `run --show-prints`.

The trainer's standard output goes to logs/prints.log, apart from its log, because it is all user code's: a reward that
prints every sample would bury the sentence with which a trainer gives up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from polyrl.history.foreign_text import printable

MAX_LINES: Final = 40
"""Shown of one read, a quarter of a second: about what a person sees; a reward may print 1,000 times a second."""
MAX_LINE_CHARS: Final = 2000
MAX_READ_BYTES: Final = 1 << 20
"""Bytes of one read; more is skipped, as its lines would be."""


class PrintsTail:
    """Follows the file, which another process appends to, from its present end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = _size(file)

    def read(self) -> list[str]:
        """The lines finished since the last call, harmless for a terminal; of many the newest, and how many not."""
        size = _size(self._file)
        if size <= self._offset:
            return []
        with self._file.open("rb") as file:
            skipped = max(0, size - self._offset - MAX_READ_BYTES)
            file.seek(self._offset + skipped)
            whole = file.read(MAX_READ_BYTES).rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += skipped + len(whole) + 1
        lines = whole.decode(errors="replace").splitlines()
        left_out = len(lines) - MAX_LINES
        more = [f"[… {left_out:,} lines more in {self._file} …]"] if left_out > 0 else []
        return more + [printable(line)[:MAX_LINE_CHARS] for line in lines[-MAX_LINES:]]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
