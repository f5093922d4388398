"""What must hold of the files that a stage draws its rows from."""

from __future__ import annotations

from typing import Final

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


DATA_RULES: Final = tuple(_has_share(kind) for kind in ("sft", "rl", "preferences"))
