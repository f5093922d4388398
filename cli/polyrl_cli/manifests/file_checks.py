"""What a manifest names on disk: data files, the user's code, model and tokenizer folders.

User code is parsed, never executed: a manifest can be validated on a machine that should not run it. Paths are relative
to the manifest. Absolute ones belong to the machine that trains, which need not be this one; `validate` omits them.

Refuses to do: reading rows or weights (the trainer does, and says so by file and line). Read next: `manifest_file`.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from polyrl.errors import InvalidManifest
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.recipe import Mode, RecipeSpec
from polyrl_cli.manifests.load import ManifestFault, fault_lines, read_manifest
from polyrl_cli.manifests.yaml_source import FieldPath

DATA_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""One of these makes a folder a tokenizer's."""

_RECIPE: Final[FieldPath] = ("spec", "recipe")


def check_files(job: PolyRLJob, manifest_path: Path, sets: Sequence[str] = (), *, absolute: bool = True) -> None:
    """Checks that what the job names is there and can be what it is named for.

    `sets` are the overrides that made the job, so that a fault names its flag; `absolute` false leaves absolute paths
    to the machine that trains.
    Raises InvalidManifest with every fault, in file order.
    """
    base = manifest_path.parent
    checks = [named for named in _named(job.spec.recipe, base) if absolute or not Path(named[1]).is_absolute()]
    faults = [ManifestFault(path, said) for path, _, check in checks if (said := check())]
    if faults:
        raise InvalidManifest(fault_lines(read_manifest(manifest_path, sets), faults))


def unchecked(job: PolyRLJob, manifest_path: Path) -> list[str]:
    """Absolute paths that the job names and that are not here; for a note."""
    found = (named for _, named, _ in _named(job.spec.recipe, manifest_path.parent))
    return sorted({named for named in found if Path(named).is_absolute() and not Path(named).exists()})


def _named(recipe: RecipeSpec, base: Path) -> Iterator[tuple[FieldPath, str, Callable[[], str]]]:
    """Every path that the recipe names: its field, the path, and the check that says what is wrong with it."""
    model, code = recipe.model, recipe.code.path
    for name, rows in (("sft", recipe.data.sft), ("rl", recipe.data.rl), ("eval", recipe.data.eval)):
        for index, row in enumerate(rows):
            yield (*_RECIPE, "data", name, index, "path"), row.path, partial(_data, base / row.path)
    if model.path is not None:
        yield (*_RECIPE, "model", "path"), model.path, partial(_model, base / model.path)
    if model.tokenizer.type == "huggingface" and model.tokenizer.path is not None:
        tokenizer = model.tokenizer.path
        yield (*_RECIPE, "model", "tokenizer", "path"), tokenizer, partial(_tokenizer, base / tokenizer)
    elif model.tokenizer.type == "huggingface" and model.path is not None:
        yield (*_RECIPE, "model", "path"), model.path, partial(_tokenizer, base / model.path)
    yield (*_RECIPE, "code", "path"), code, partial(_folder, base / code)
    for path, written in _functions(recipe):
        yield path, code, partial(_function, base / code, written)


def _functions(recipe: RecipeSpec) -> Iterator[tuple[FieldPath, str]]:
    if recipe.reward is not None and recipe.mode in (Mode.RL, Mode.SFT_RL):
        yield (*_RECIPE, "reward", "function"), recipe.reward.function
    if recipe.algorithm.filter_function is not None:
        yield (*_RECIPE, "algorithm", "filterFunction"), recipe.algorithm.filter_function
    if recipe.environment is not None:
        yield (*_RECIPE, "environment", "classPath"), recipe.environment.class_path


def _data(file: Path) -> str:
    if not file.name.endswith(DATA_SUFFIXES):
        return f"{file} is neither {' nor '.join(DATA_SUFFIXES)}"
    if not file.is_file():
        return f"{file} is a folder, not a file" if file.is_dir() else f"no such file: {file}"
    return f"{file} is empty" if file.stat().st_size == 0 else ""


def _folder(folder: Path) -> str:
    if folder.is_dir():
        return ""
    return f"{folder} is a file, not a folder" if folder.exists() else f"no such folder: {folder}"


def _model(folder: Path) -> str:
    if said := _folder(folder):
        return said
    return "" if (folder / "config.json").is_file() else f"{folder} has no config.json and is no Hugging Face model"


def _tokenizer(folder: Path) -> str:
    if not folder.is_dir():
        # For a model's own folder the check of the model has said so already.
        return "" if (folder / "config.json").exists() else _folder(folder)
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return ""
    return f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES)})"


def _function(folder: Path, written: str) -> str:
    """What is wrong with `module:function`, looked up in the folder and then where Python finds its modules."""
    if not folder.is_dir():
        return ""  # Said at code.path, once.
    module, _, name = written.partition(":")
    file = _module_file(folder, module)
    if file is None:
        return f"no module {module} in {folder} (no {module.replace('.', '/')}.py)"
    try:
        names = _top_level_names(ast.parse(file.read_bytes()))
    except SyntaxError as error:
        return f"{file}:{error.lineno} is not valid Python ({error.msg})"
    except ValueError:
        return f"{file} is not Python source"
    if name in names:
        return ""
    close = difflib.get_close_matches(name, names, n=1)
    return f"{file} defines no {name}" + (f"; did you mean {close[0]}?" if close else "")


def _module_file(folder: Path, module: str) -> Path | None:
    stem = Path(*module.split("."))
    for root in (folder, *map(Path, filter(None, sys.path))):
        for file in (root / stem.with_suffix(".py"), root / stem / "__init__.py"):
            if file.is_file():
                return file
    return None


def _top_level_names(module: ast.Module) -> set[str]:
    """Names that importing the module would bind, also within `if` and `try`."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(module.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return names
