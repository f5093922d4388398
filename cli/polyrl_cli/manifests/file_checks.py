"""What a manifest names on disk: data files, the user's code, model and tokenizer folders.

User code is parsed here, never executed, so that a manifest can be looked at on a machine that should not run it
(`--no-check`). What is in the files is `checks`'.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from polyrl.manifest.data import named_rows
from polyrl.manifest.parts.sources import HUB_ID, MODEL_URI, ROWS_SUFFIXES, no_pattern
from polyrl.manifest.recipe import RecipeSpec
from polyrl_cli.manifests.yaml_source import FieldPath, ManifestFault

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""One of these makes a folder a tokenizer's."""

_RECIPE: Final[FieldPath] = ("spec", "recipe")


class NamedPath(NamedTuple):
    """A path that the recipe names."""

    field: FieldPath
    path: str
    """Relative to the manifest, or absolute."""
    check: Callable[[Path], str]
    """What is wrong with it, as a sentence; empty: nothing."""


def file_faults(recipe: RecipeSpec, base: Path, *, absolute: bool) -> list[ManifestFault]:
    """Everything that is not there or cannot be what it is named for. Relative paths begin at `base`; `absolute` false
    leaves absolute ones that are not here to the machine that trains."""
    every = (*named_files(recipe), *_named_code(recipe))
    named = [one for one in every if absolute or not Path(one.path).is_absolute() or Path(one.path).exists()]
    return [ManifestFault(one.field, fault) for one in named if (fault := one.check(base / one.path))]


def absolute_paths_elsewhere(recipe: RecipeSpec) -> list[str]:
    """Absolute paths that the recipe names and that are not on this machine."""
    paths = {one.path for one in (*named_files(recipe), *_named_code(recipe))}
    return sorted(path for path in paths if Path(path).is_absolute() and not Path(path).exists())


def named_files(recipe: RecipeSpec) -> Iterator[NamedPath]:
    """Data files that are not fetched, and the folders of model and tokenizer."""
    model = recipe.model
    for field, row in named_rows(recipe.data, recipe.evaluation):
        if "://" not in row.path:
            yield NamedPath((*_RECIPE, *field), row.path, check=_data)
    if model.path is not None:
        yield NamedPath((*_RECIPE, "model", "path"), model.path, check=partial(_model, model.path))
    if model.tokenizer.type == "huggingface" and model.tokenizer.path is not None:
        yield NamedPath((*_RECIPE, "model", "tokenizer", "path"), model.tokenizer.path, check=_tokenizer)
    elif model.tokenizer.type == "huggingface" and model.path is not None:
        yield NamedPath((*_RECIPE, "model", "path"), model.path, check=partial(_own_tokenizer, model.path))


def _named_code(recipe: RecipeSpec) -> Iterator[NamedPath]:
    code = recipe.code.path
    yield NamedPath((*_RECIPE, "code", "path"), code, check=_folder)
    if recipe.reward is not None and recipe.mode.is_online:
        yield NamedPath((*_RECIPE, "reward", "function"), code, check=partial(_function, recipe.reward.function))
    algorithm = recipe.algorithm
    for name, function in (
        ("filterFunction", algorithm.filter_function),
        ("lossFunction", algorithm.loss_function),
        ("advantageFunction", algorithm.advantage_function),
    ):
        if function is not None:
            yield NamedPath((*_RECIPE, "algorithm", name), code, check=partial(_function, function))
    if recipe.environment is not None:
        yield NamedPath(
            (*_RECIPE, "environment", "classPath"), code, check=partial(_function, recipe.environment.class_path)
        )


def _data(file: Path) -> str:
    if not file.name.endswith(ROWS_SUFFIXES):
        return f"{file} is neither {' nor '.join(ROWS_SUFFIXES)}"
    if not file.is_file():
        return f"{file} is a folder, not a file" if file.is_dir() else f"no such file: {file}{no_pattern(file.name)}"
    return f"{file} is empty" if file.stat().st_size == 0 else ""


def _folder(folder: Path) -> str:
    if folder.is_dir():
        return ""
    return f"{folder} is a file, not a folder" if folder.exists() else f"no such folder: {folder}"


def _own_tokenizer(written: str, folder: Path) -> str:
    return "" if _is_elsewhere(written, folder) else _tokenizer(folder)


def _is_elsewhere(written: str, folder: Path) -> bool:
    """On a Hub, whose models are named like folders, or where a URI says."""
    if MODEL_URI.match(written) is not None:
        return True
    return HUB_ID.fullmatch(written) is not None and not folder.exists()


def _model(written: str, folder: Path) -> str:
    if _is_elsewhere(written, folder):
        return ""
    if fault := _folder(folder):
        return fault
    return "" if (folder / "config.json").is_file() else f"{folder} has no config.json and is no Hugging Face model"


def _tokenizer(folder: Path) -> str:
    if not folder.is_dir():
        # For a model's own folder the check of the model has reported it already.
        return "" if (folder / "config.json").exists() else _folder(folder)
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return ""
    return f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES)})"


def _function(written: str, folder: Path) -> str:
    """What is wrong with `module:function`, looked up in the folder and then where Python finds its modules."""
    if not folder.is_dir():
        return ""  # reported at code.path, once
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
