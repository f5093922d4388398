"""Where in the user's own code an error arose: a library that it called, and PolyRL which called it, are not the place
to look."""

from __future__ import annotations

import sysconfig
import traceback
from functools import cache
from pathlib import Path

import polyrl_trainer


def describe(error: BaseException) -> str:
    """`KeyError: 'answer' (/home/me/reward.py:3)`, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    place = user_place(error)
    return f"{text} ({place})" if place else text


def user_place(error: BaseException) -> str:
    """`FILE:LINE` of the innermost frame that is the user's own, else of the innermost one; empty without frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _is_own(file: str) -> bool:
    return not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in _others())


@cache
def _others() -> tuple[Path, ...]:
    """Folders of Python, of installed packages and of this one."""
    paths = sysconfig.get_paths()
    return (*(Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _our_folder())


def _our_folder() -> Path:
    return Path(polyrl_trainer.__path__[0])
