"""Loads the user's `module:function` from `recipe.code.path`, and refuses what would fail in the middle of a run."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from polyrl.errors import InvalidCode
from polyrl_trainer.environments.protocol import Environment
from polyrl_trainer.user_code.frames import describe


def load_object(reference: str, code_path: Path) -> Any:
    """What `module:name` names, importable from `code_path` or installed. Raises InvalidCode."""
    module_name, colon, name = reference.partition(":")
    if not colon or not _is_dotted(module_name) or not name.isidentifier():
        raise InvalidCode(f"{reference!r}: must look like `module:function`, for example `rewards:score`")
    if not code_path.is_dir():
        raise InvalidCode(f"{reference}: recipe.code.path {code_path} is no folder")
    module = _import(reference, module_name, code_path)
    if not hasattr(module, name):
        raise InvalidCode(f"{reference}: module `{module_name}` has no `{name}`; it has {_public_names(module)}")
    return getattr(module, name)


def load_function(reference: str, code_path: Path, arguments: int = 1) -> Callable[..., Any]:
    """A function of `arguments` positional arguments, sync or async. Raises InvalidCode."""
    function = load_object(reference, code_path)
    if not callable(function):
        raise InvalidCode(f"{reference}: must be a function, got {type(function).__name__}")
    if inspect.isclass(function):
        raise InvalidCode(f"{reference}: must be a function, got a class; name a function that returns the result")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidCode(f"{reference}: must return its result, but it yields")
    check_arity(reference, function, arguments)
    return function  # type: ignore[no-any-return]


def load_environment(reference: str, code_path: Path) -> Environment:
    """Raises InvalidCode naming the class and what it lacks."""
    made = load_object(reference, code_path)
    if not isinstance(made, type):
        raise InvalidCode(f"{reference}: must be a class with `async def run(self, sample, generate)`")
    check_arity(reference, made, 0)
    try:
        environment = made()
    except Exception as error:  # User code may raise anything.
        raise InvalidCode(f"{reference}: making it raised {describe(error)}") from error
    if not asyncio.iscoroutinefunction(getattr(environment, "run", None)):
        raise InvalidCode(f"{reference}: has no `async def run(self, sample, generate)`")
    check_arity(f"{reference}.run", environment.run, 2)
    return environment  # type: ignore[no-any-return]


def check_arity(reference: str, function: Callable[..., Any], arguments: int) -> None:
    """Raises InvalidCode when `function` cannot be called with `arguments` positional arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Built-ins without a signature show their arity when called.
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        plural = "argument" if arguments == 1 else "arguments"
        raise InvalidCode(
            f"{reference}: is called with {arguments} {plural}, but its signature is {signature}"
        ) from error


def _import(reference: str, module_name: str, code_path: Path) -> ModuleType:
    folder = str(code_path.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise InvalidCode(f"{reference}: there is no module `{module_name}` in {code_path}") from error
        raise _import_raised(reference, module_name, error) from error
    except SyntaxError as error:
        raise InvalidCode(f"{reference}: {error.filename}:{error.lineno}: syntax error: {error.msg}") from error
    except (Exception, SystemExit) as error:  # User code may raise anything while it is imported.
        raise _import_raised(reference, module_name, error) from error


def _import_raised(reference: str, module_name: str, error: BaseException) -> InvalidCode:
    return InvalidCode(f"{reference}: importing `{module_name}` raised {describe(error)}")


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _public_names(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if not name.startswith("_") and inspect.isfunction(value)]
    return ", ".join(f"`{name}`" for name in names[:8]) or "no functions"
