"""How the reference of Python shows docstrings: examples as code, and a method as the port that it fits describes it.

Read by mkdocstrings as an extension of griffe (mkdocs.yml).
"""

from __future__ import annotations

import re
from typing import Any, Final

from griffe import Class, Docstring, Extension

EXAMPLE: Final = re.compile(r"^>>> .*?(?=\n[ \t]*\n|\Z)", re.MULTILINE | re.DOTALL)


def fenced(text: str) -> str:
    """Examples as blocks of code; Markdown would take them for quotations."""
    return EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)


class Shown(Extension):
    """Changes what is shown, never what is written."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Of everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """A method without a docstring has that of its base; what came before it is loaded by now."""
        for base in cls.resolved_bases:
            for name, member in cls.members.items():
                port = base.members.get(name)
                if member.is_function and member.docstring is None and port is not None and port.docstring is not None:
                    member.docstring = Docstring(port.docstring.value, parent=member)
