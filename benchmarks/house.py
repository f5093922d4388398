"""Figures of the tree itself: how much there is, how it lies, and what is declared more than once.

    python benchmarks/house.py [ROOT ...]

One column per checkout, so that two commits can be set side by side. Test kits (`testing/`, and before there was such a
folder: `simulation/`, `fake_*`, `*_conformance`) count apart, since no image carries them.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TOP_FOLDERS: Final = ("core", "operator", "cli", "rollout", "trainer")

FIELD_SETS: Final = {
    "an engine's capacity": {"max_running", "kv_tokens", "max_context"},
    "a reference to weights": {"endpoint", "public_key", "manifest_hash"},
    "a sample's tokens and logprobs": {"ids", "logprobs"},
}
"""A class that declares all fields of a set is one representation of that thing."""


def is_test_kit(path: Path) -> bool:
    parts = set(path.parts)
    return (
        bool(parts & {"testing", "simulation"}) or path.stem.startswith("fake_") or path.stem.endswith("_conformance")
    )


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def fields(node: ast.ClassDef) -> set[str]:
    return {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def figures(root: Path) -> dict[str, str]:
    paths = [p.relative_to(root) for top in TOP_FOLDERS for p in sorted((root / top).rglob("*.py"))]
    production = [p for p in paths if not is_test_kit(p)]
    trees = {p: ast.parse((root / p).read_text()) for p in production}
    lines = {p: (root / p).read_text().count("\n") for p in paths}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    doubles = {name: n for name, n in Counter(node.name for node in classes).items() if n > 1}
    modules = {module_name(p) for p in production}
    importers: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for name in imported(tree, modules):
            importers[name].add(path)
    single = [p for p in production if len(importers[module_name(p)]) == 1 and p.stem not in ("__init__", "__main__")]
    lengths = sorted(lines[p] for p in production)
    functions = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {
        "production, lines": f"{sum(lines[p] for p in production):,}",
        "test kits, lines": f"{sum(lines[p] for p in paths if is_test_kit(p)):,}",
        "production, files": str(len(production)),
        "folders": str(len({p.parent for p in production})),
        "files side by side, most": str(max(Counter(p.parent for p in production).values())),
        "file, median / longest": f"{lengths[len(lengths) // 2]} / {lengths[-1]}",
        "function, median / p90 / longest": (
            f"{functions[len(functions) // 2]} / {functions[int(len(functions) * 0.9)]} / {functions[-1]}"
        ),
        "class names declared twice": str(len(doubles)),
        "modules that only one other imports": str(len(single)),
        **{
            f"classes that are {what}": str(sum(wanted <= fields(n) for n in classes))
            for what, wanted in FIELD_SETS.items()
        },
    }


def main(roots: list[Path]) -> None:
    columns = [figures(root) for root in roots]
    print("| | " + " | ".join(str(root) for root in roots) + " |")
    print("|---|" + "---|" * len(roots))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main([Path(root) for root in sys.argv[1:]] or [Path(__file__).parents[1]])
