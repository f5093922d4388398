"""Where in the user's own code an error arose: a library that it called, and PolyRL which called it, are not the place
to look."""

from __future__ import annotations

import sysconfig
import traceback
from functools import cache
from pathlib import Path
from typing import Final

import polyrl_trainer
from polyrl_trainer.sample_log.texts import readable

MAX_CHARS: Final = 700
"""Characters of a message, which every checkpoint holds; with its place it fits a rejection (`wire.MAX_REASON`)."""


def describe(error: BaseException) -> str:
    """`KeyError: 'answer' (/home/me/reward.py:3)`, on one line."""
    words = readable(_words(error), MAX_CHARS)
    text = " ".join(f"{type(error).__name__}: {words}".split()).removesuffix(":")
    place = user_place(error)
    return f"{text} ({place})" if place else text


def _words(error: BaseException) -> str:
    """Nothing of an error that cannot say what it is."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's class, or a library's, may raise anything
        return ""


def user_place(error: BaseException) -> str:
    """`FILE:LINE` of the innermost frame that is the user's own, also of an error that this one came from, else of the
    innermost one; empty without frames."""
    found = [traceback.extract_tb(one.__traceback__) for one in _came_from(error)]
    own = [frame for frames in found for frame in reversed(frames) if _is_own(frame.filename)]
    innermost = own[:1] or found[0][-1:]
    return f"{innermost[0].filename}:{innermost[0].lineno}" if innermost else ""


def _came_from(error: BaseException) -> list[BaseException]:
    """The error, and what it was raised over, the newest first."""
    chain, earlier = [error], error.__cause__ or error.__context__
    while earlier is not None and earlier not in chain:
        chain.append(earlier)
        earlier = earlier.__cause__ or earlier.__context__
    return chain


def _is_own(file: str) -> bool:
    return not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in _others())


@cache
def _others() -> tuple[Path, ...]:
    """Folders of Python, of installed packages and of this one."""
    paths = sysconfig.get_paths()
    return (*(Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _our_folder())


def _our_folder() -> Path:
    return Path(polyrl_trainer.__path__[0])
