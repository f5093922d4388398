"""Where commands print: as wide as the terminal, and 120 columns where there is none, as in a log or a pipe.

What is printed may hold what models, user code or other machines wrote, so here all of it is made harmless: it is never
read as markup, and what a terminal would obey is spelled out.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from polyrl import interpreter
from polyrl.history.foreign_text import printable

WIDTH_ELSEWHERE: Final = 120


class Terminal(Console):
    """A console whose texts are harmless, whoever made them."""

    def on_broken_pipe(self) -> None:
        """Whoever read has gone, as `head` does: what is under way goes on, unseen."""
        self.quiet = True
        interpreter.drop_output()

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # so a terminal answers whose window was closed
                interpreter.unwritten(error)
            self.on_broken_pipe()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Rich's own moves of the cursor are marked as such.
            yield segment if segment.control else segment._replace(text=printable(segment.text, lines=True))


def terminal() -> Terminal:
    """Numbers and paths in what it prints get no colours of its own."""
    return Terminal(width=None if sys.stdout.isatty() else WIDTH_ELSEWHERE, highlight=False, markup=False, emoji=False)
