"""What must hold of the files that a stage draws its rows from."""

from __future__ import annotations

import re
from typing import Final

from polyrl.manifest.data import DatasetSpec
from polyrl.manifest.parts.sources import ROWS_SUFFIXES, ROWS_URI
from polyrl.manifest.rules.rule import Rule


def _has_share(kind: str) -> Rule:
    files = f"recipe.data.{kind}"
    return Rule(
        f"{kind}-drawn",
        files,
        message="every file here has weight 0, so that nothing is drawn; give one a weight above 0",
        holds=lambda s: not getattr(s.recipe.data, kind) or any(one.weight > 0 for one in getattr(s.recipe.data, kind)),
        cel=f"size(self.{files}) == 0 || self.{files}.exists(f, f.weight > 0.0)",
    )


_ENDS: Final = " || ".join(f"f.path.endsWith('{suffix}')" for suffix in ROWS_SUFFIXES)
_REACHED: Final = f"!f.path.contains('://') || (f.path.matches('{ROWS_URI}') && ({_ENDS}) && !f.path.contains('/../'))"
_REACHED_MESSAGE: Final = (
    "a URI here is none from which a file of rows is fetched: hf://datasets/OWNER/NAME@REVISION/FILE, s3://BUCKET/FILE,"
    " gs://BUCKET/FILE, file:///FILE, and FILE ends in .jsonl, .jsonl.gz or .parquet; a claim is mounted by the"
    " trainer's template, and its files are named by their paths"
)


def _are_reached(files: list[DatasetSpec]) -> bool:
    away = [f.path for f in files if "://" in f.path]
    return all(re.search(ROWS_URI, path) and path.endswith(ROWS_SUFFIXES) and "/../" not in path for path in away)


def _is_reached(kind: str) -> Rule:
    files = f"recipe.data.{kind}"
    return Rule(
        f"{kind}-reached",
        files,
        message=_REACHED_MESSAGE,
        holds=lambda s: _are_reached(getattr(s.recipe.data, kind)),
        cel=f"self.{files}.all(f, {_REACHED})",
    )


DATA_RULES: Final = (
    *(_has_share(kind) for kind in ("sft", "rl", "preferences")),
    *(_is_reached(kind) for kind in ("sft", "rl", "preferences", "eval")),
    Rule(
        "eval-sets-reached",
        "recipe.evaluation.sets",
        message=_REACHED_MESSAGE,
        holds=lambda s: all(_are_reached(one.data) for one in s.recipe.evaluation.sets),
        cel=f"self.recipe.evaluation.sets.all(e, e.data.all(f, {_REACHED}))",
    ),
)
