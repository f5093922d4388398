"""The house's shape, held by a test: sizes, docstrings, names, and that nothing is importable as `operator`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("core/polyrl", "operator/polyrl_operator", "rollout/polyrl_rollout", "trainer/polyrl_trainer")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
P90_FUNCTION_LINES = 35
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_small_named_and_says_what_it_is_for(path: Path) -> None:
    assert path.read_text().count("\n") <= MAX_FILE_LINES
    assert path.stem not in VAGUE
    assert ast.get_docstring(ast.parse(path.read_text())), "a module opens with what it is for"
    too_long = {node.name: length(node) for node in functions(path) if length(node) > MAX_FUNCTION_LINES}
    assert not too_long


def test_nine_of_ten_functions_are_short() -> None:
    lengths = sorted(length(node) for path in MODULES for node in functions(path))
    assert lengths[int(len(lengths) * 0.9)] <= P90_FUNCTION_LINES


def test_nothing_is_importable_as_operator() -> None:
    assert not list(ROOT.glob("operator/*.py")), "a module directly in operator/ would shadow the standard library"
    program = "import operator; print(operator.__file__)"
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert str(ROOT) not in answer.stdout


def test_tests_are_no_package() -> None:
    packages = [path for path in (ROOT / "tests").rglob("__init__.py") if "stand-ins" not in path.parts]
    assert not packages, "stand-ins are packages of their own; tests are none"


def test_core_loads_nothing_heavy() -> None:
    program = (
        "import sys, pkgutil, importlib, polyrl\n"
        "for m in pkgutil.walk_packages(polyrl.__path__, 'polyrl.'): importlib.import_module(m.name)\n"
        "heavy = ('torch', 'zmq', 'kopf', 'kubernetes', 'yaml', 'aiohttp', 'transformers')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
