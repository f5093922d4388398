"""Steps: how many are whole, how many a manifest asks for. A manifest from elsewhere may hold anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from polyrl.history.rows import LARGEST, MetricsRow

TRAINING_PHASES: Final = ("sft", "rl", "offline-rl", "dpo", "reward-model")
"""Phases of metrics.jsonl that train."""


def steps_done(rows: Sequence[MetricsRow]) -> dict[str, int]:
    """Whole ones, by stage."""
    return {row.phase: row.step for row in rows if row.phase in TRAINING_PHASES}


def wanted_steps(job: Mapping[str, Any]) -> dict[str, int]:
    """What a manifest asks for, by stage."""
    recipe = object_in(object_in(job, "spec"), "recipe")
    mode, rl = str(recipe.get("mode", "")), _whole_in(object_in(recipe, "algorithm"), "steps")
    if mode == "offline-rl":
        return {"offline-rl": rl}
    sections = {"sft": "sft", "dpo": "dpo", "reward-model": "rewardModel"}
    steps = {"rl": rl, **{stage: _whole_in(object_in(recipe, name), "steps") for stage, name in sections.items()}}
    return {stage: steps[stage] for stage in mode.split("+") if stage in steps}


def object_in(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of that name; {} where there is none or another kind of value, as a folder from elsewhere may hold."""
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def _whole_in(of: Mapping[str, Any], name: str) -> int:
    return int(number_in(of, name, 0))


def number_in(of: Mapping[str, Any], name: str, default: float) -> float:
    """A number of that name that is not too large for anything counted; else `default`."""
    found = of.get(name)
    return found if isinstance(found, int | float) and abs(found) <= LARGEST else default
