"""The house's shape, held by a test: sizes, docstrings, names, folders, and what goes into the wheel."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, TypeGuard

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = {
    "core": "core/polyrl",
    "operator": "operator/polyrl_operator",
    "cli": "cli/polyrl_cli",
    "rollout": "rollout/polyrl_rollout",
    "trainer": "trainer/polyrl_trainer",
}
MODULES: Final = sorted(path for package in PACKAGES.values() for path in (ROOT / package).rglob("*.py"))
PRODUCTION: Final = [path for path in MODULES if "testing" not in path.parts]

MAX_FILE_LINES: Final = 500
MAX_FUNCTION_LINES: Final = 60
P90_FUNCTION_LINES: Final = 35
MAX_MODULES_IN_A_FOLDER: Final = 12
MAX_LINES: Final = 74_664
"""Of production code in all."""
NAMED_ROWS: Final = ("tests/unit/core", "tests/properties")
"""Folders of tests whose tables name their rows."""
ENUMS: Final = {"Enum", "StrEnum", "IntEnum", "IntFlag"}
VAGUE: Final = {"utils", "util", "helpers", "helper", "common", "misc"}


# Of a private language. What they mean has a name in the field: told is confirmed, a beat is a heartbeat, and so on.
NEVER: Final = {
    "burial", "dear", "desk", "disown", "drill", "drills", "farewell", "frost", "frosts", "historian", "inflict",
    "inflicted", "inflicts", "infliction", "judged", "leash", "owed", "patience", "probation", "singles", "speaker",
    "stories", "story", "strike", "striker", "strikes", "struck", "tally", "told", "unask", "wish", "wished",
}  # fmt: skip
"""In no text either, whatever the sense."""
NO_PHRASES: Final = {"refuses to hold", "read next"}
"""What a module does not hold is where it is; where to go on is said by what it imports."""
NEVER_A_NAME: Final = NEVER | {
    "beat", "bye", "closing", "cut", "dismiss", "gate", "goes", "hear", "hears", "homes", "look", "looked", "looks",
    "missed", "obey", "obeys", "patient", "said", "say", "says", "soon", "stamp", "stamps", "tell", "tells", "trusted",
}  # fmt: skip
"""Of what is defined or used; a sentence of a text may hold them."""
ORDINARY: Final = {
    "call_soon", "call_soon_threadsafe", "closing", "tell",  # of Python
    "cut", "cut_chunks",  # a stream into chunks
    "look_for_stragglers",
    "beat_s",  # the wire's
}  # fmt: skip
TEXTS: Final = {".py", ".md", ".toml", ".yaml", ".mk"}
NO_TEXTS: Final = {"CHANGELOG.md", "test_house.py"}
"""What was is written as it was called; this file names what it looks for."""


ENTRIES: Final = {"main", "run"}
"""What a process enters by, and a command of the command line."""
OF_EACH: Final = {"RECEIVE_HWM", "SEND_HWM", "START_DEADLINE_S", "LOAD_DEADLINE_S"}
"""A number that every socket, or every engine, has for itself."""


@cache
def tracked() -> list[Path]:
    """Files of the repository, new ones too."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return sorted(path for path in map(ROOT.joinpath, answer.stdout.splitlines()) if path.is_file())


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_files_are_small() -> None:
    assert [name(path) for path in MODULES if lines(path) > MAX_FILE_LINES] == []


def test_folders_are_small() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in MODULES:
        counts[name(path.parent)] += 1
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES_IN_A_FOLDER} == {}


def test_folders_of_unit_tests_are_small() -> None:
    counts = Counter(name(path.parent) for path in (ROOT / "tests/unit").rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES_IN_A_FOLDER} == {}


def test_production_is_small() -> None:
    assert sum(lines(path) for path in PRODUCTION) <= MAX_LINES


@pytest.mark.slow
def test_functions_are_short() -> None:
    lengths = {f"{name(path)}:{node.name}": length(node) for path in MODULES for node in functions(path)}
    assert {where: size for where, size in lengths.items() if size > MAX_FUNCTION_LINES} == {}
    assert sorted(lengths.values())[int(len(lengths) * 0.9)] <= P90_FUNCTION_LINES


def test_modules_and_packages_say_what_they_are_for() -> None:
    assert [name(path) for path in MODULES if not ast.get_docstring(tree(path))] == []
    folders = {path.parent for path in MODULES}
    assert [name(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_a_package_names_its_folders() -> None:
    unnamed = []
    for folder in {path.parent for path in PRODUCTION}:
        named = set(re.findall(r"\w+", ast.get_docstring(tree(folder / "__init__.py")) or ""))
        below = {init.parent.name for init in folder.glob("*/__init__.py")} - {"testing"}
        unnamed += [f"{name(folder)}: {part}" for part in sorted(below - named)]
    assert unnamed == []


def test_no_module_has_a_vague_name() -> None:
    assert [name(path) for path in MODULES if path.stem in VAGUE or path.parent.name in VAGUE] == []


def test_a_class_name_exists_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{name(path)}:{node.lineno}")
    assert {double: places for double, places in found.items() if len(places) > 1} == {}


def test_a_public_function_of_a_module_exists_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in PRODUCTION:
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                found[node.name].append(f"{name(path)}:{node.lineno}")
    assert {double: places for double, places in found.items() if len(places) > 1 and double not in ENTRIES} == {}


def constants(path: Path) -> Iterator[tuple[str, str]]:
    """Name and value of each that the module defines for others too."""
    for node in tree(path).body:
        match node:
            case ast.AnnAssign(target=ast.Name(known), value=ast.expr() as value) if (
                known.isupper() and known[0] != "_"
            ):
                yield known, ast.unparse(value)
            case ast.Assign(targets=[ast.Name(known)], value=value) if known.isupper() and known[0] != "_":
                yield known, ast.unparse(value)


def test_a_constant_has_one_value_within_a_package() -> None:
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for path in PRODUCTION:
        for known, value in constants(path):
            found[path.relative_to(ROOT).parts[0], known][value] = name(path)
    several = {double: places for double, places in found.items() if len(places) > 1}
    assert {double: places for double, places in several.items() if double[1] not in OF_EACH} == {}


def called(node: ast.AST) -> str:
    """The last part of a dotted name, of a call or of a subscript."""
    node = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def values() -> set[str]:
    """Classes that only hold fields: dataclasses, named tuples and messages."""
    classes = [node for path in MODULES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    found = {"Struct", "NamedTuple"}
    found |= {node.name for node in classes if "dataclass" in map(called, node.decorator_list)}
    while more := {node.name for node in classes if found & set(map(called, node.bases))} - found:
        found |= more
    return found


def is_puzzle(node: ast.Call) -> bool:
    return len(node.args) > 2 or (any(isinstance(part, ast.Starred) for part in node.args) and len(node.args) > 1)


@pytest.mark.slow
def test_values_are_made_with_keywords_from_the_third_argument_on() -> None:
    known = values()
    calls = [(path, node) for path in MODULES for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    assert [f"{name(path)}:{node.lineno}" for path, node in calls if called(node) in known and is_puzzle(node)] == []


def is_enum(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and bool(ENUMS & set(map(called, node.bases)))


def test_every_member_of_an_enum_says_what_it_means() -> None:
    silent = []
    for path in PRODUCTION:
        for node in filter(is_enum, ast.walk(tree(path))):
            after = zip(node.body, [*node.body[1:], None], strict=True)
            silent += [
                f"{name(path)}:{member.lineno}"
                for member, following in after
                if isinstance(member, ast.Assign)
                and not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant))
            ]
    assert silent == []


def identifiers(path: Path) -> set[str]:
    """Defined or used in a module."""
    fields = (getattr(node, field, None) for node in ast.walk(tree(path)) for field in ("id", "attr", "arg", "name"))
    return {field for field in fields if isinstance(field, str)}


def words(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def is_sentence(identifier: str) -> bool:
    """A test's name is one, and reads as text does."""
    return identifier.startswith("test_")


@pytest.mark.slow
def test_no_name_holds_a_private_word() -> None:
    files = [path for path in tracked() if path.suffix == ".py" and "stand-ins" not in path.parts]
    used = {path.stem for path in files}.union(*map(identifiers, files)) - ORDINARY
    private = {each for each in used if set(words(each)) & (NEVER if is_sentence(each) else NEVER_A_NAME)}
    assert sorted(private) == []


@pytest.mark.slow
def test_no_text_holds_a_private_word() -> None:
    pattern = re.compile(rf"\b({'|'.join(NEVER | NO_PHRASES)})\b", re.IGNORECASE)
    texts = [path for path in tracked() if path.suffix in TEXTS and path.name not in NO_TEXTS]
    assert [
        f"{name(path)}:{number}: {found[0]}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := pattern.search(line))
    ] == []


def test_unit_tests_lie_as_what_they_test_lies() -> None:
    folders = {path.parent.relative_to(ROOT / "tests/unit") for path in (ROOT / "tests/unit").rglob("test_*.py")}
    strangers = [
        str(folder)
        for folder in folders
        if folder.parts
        and not (folder.parts[0] in PACKAGES and (ROOT / PACKAGES[folder.parts[0]] / Path(*folder.parts[1:])).is_dir())
    ]
    assert strangers == []


def names_itself(row: ast.expr) -> bool:
    """Strings do, and single values; `pytest.param` with an `id` has a name."""
    if isinstance(row, ast.Call):
        return any(keyword.arg == "id" for keyword in row.keywords)
    if isinstance(row, ast.Tuple):
        return all(isinstance(value, ast.Constant) and isinstance(value.value, str) for value in row.elts)
    return not isinstance(row, ast.List | ast.Dict | ast.Lambda)


def rows(path: Path, table: ast.expr) -> list[ast.expr]:
    """Of a table as it is written, in the call or under a name of the module; none of one that is computed."""
    if isinstance(table, ast.Name):
        constants = [node for node in tree(path).body if isinstance(node, ast.Assign)]
        table = next((node.value for node in constants if ast.unparse(node.targets[0]) == table.id), table)
    return table.elts if isinstance(table, ast.List | ast.Tuple) else []


def test_rows_of_tables_have_names() -> None:
    """A failure says which case it is about, not `1-64-expected0`."""
    nameless = []
    for path in [file for folder in NAMED_ROWS for file in (ROOT / folder).rglob("test_*.py")]:
        calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and called(node) == "parametrize"]
        tables = [node for node in calls if not any(keyword.arg == "ids" for keyword in node.keywords)]
        found = [row for node in tables for row in rows(path, node.args[1]) if not names_itself(row)]
        nameless += [f"{name(path)}:{row.lineno}" for row in found]
    assert nameless == []


def test_tests_are_no_package() -> None:
    packages = [path for path in (ROOT / "tests").rglob("__init__.py") if "stand-ins" not in path.parts]
    assert not packages, "stand-ins are packages of their own; tests are none"


def test_what_make_test_leaves_out_is_run_by_another_command() -> None:
    def holding(pattern: str) -> set[str]:
        files = (ROOT / "tests").rglob("test_*.py")
        return {name(path.parent) for path in files if re.search(pattern, path.read_text()) and path != Path(__file__)}

    commands = "".join(path.read_text() for path in [ROOT / "Makefile", *(ROOT / "make").glob("*.mk")])
    listed = re.search(r"^API_TESTS := (.*)$", commands, re.MULTILINE)
    assert listed
    assert holding(r"\b(api_server|helm_program)\b") <= set(listed[1].split())


def test_the_wheel_holds_all_packages_and_no_test_kit() -> None:
    inside = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    expected = {
        str(path.relative_to(ROOT / top)) for top in PACKAGES for path in PRODUCTION if name(path).startswith(top)
    }
    assert {file for file in inside if file.endswith(".py")} == expected
    assert [file for file in inside if "testing" in Path(file).parts] == []


def test_nothing_is_importable_as_operator() -> None:
    assert not list(ROOT.glob("operator/*.py")), "a module directly in operator/ would shadow the standard library"
    program = "import operator; print(operator.__file__)"
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert str(ROOT) not in answer.stdout


def test_core_loads_nothing_heavy() -> None:
    program = (
        "import sys, pkgutil, importlib, polyrl\n"
        "for m in pkgutil.walk_packages(polyrl.__path__, 'polyrl.'): importlib.import_module(m.name)\n"
        "heavy = ('torch', 'zmq', 'kopf', 'kubernetes', 'yaml', 'aiohttp', 'transformers')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"


LIGHT: Final = {
    "polyrl_cli.app": {"numpy", "pydantic", "rich", "zmq"},
    "polyrl_cli.local.run": {"kopf", "kubernetes", "matplotlib", "torch", "transformers"},
    "polyrl_rollout.agent.__main__": {"torch", "transformers"},
    "polyrl_rollout.manager.__main__": {"cryptography", "kopf", "torch", "transformers"},
    "polyrl_trainer.check.__main__": {"torch", "transformers", "zmq"},
    "polyrl_trainer.user_code.workers.worker": {"pydantic", "torch", "transformers", "zmq"},
}
"""What a process imports as it begins, and what it must not: people wait for it, or it is started many times."""


@pytest.mark.slow
@pytest.mark.parametrize("module", LIGHT)
def test_a_process_that_begins_loads_nothing_it_can_do_without(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert LIGHT[module] & set(answer.stdout.split()) == set()
