"""PolyRLJobs as a hostile tenant may write them, drawn by a seed: as text, for no serializer takes some of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

DEEP: Final = 1100
"""Levels that no recursive parser of ours survives."""
LONG: Final = 600 << 10
"""Bytes; more than are read of one job."""

NESTED: Final = (
    lambda depth: "[" * depth + "]" * depth,
    lambda depth: '{"a":' * depth + "1" + "}" * depth,
    lambda depth: '[{"a":' * (depth // 2) + "null" + "}]" * (depth // 2),
)
WORDS: Final = (
    "",
    "]}]}",
    '\\"]',
    "\\u0000\\u001b]52;c;AA==\\u0007",
    "\\ud83d\\ude00\\u202e",
    "polyrl.dev/cut-off",
    "x" * 300,
)
NUMBERS: Final = ("-0", "1e308", "-1e-308", str(2**63), str(-(2**64)), "0.1", "9" * 30)


def hostile_value(draw: random.Random, depth: int = 0) -> str:
    """JSON of whatever an open field may hold."""
    kinds: list[Callable[[], str]] = [
        lambda: f'"{draw.choice(WORDS)}"',
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice(("null", "true", "false")),
    ]
    if depth < 4:
        kinds += [
            lambda: f"[{','.join(hostile_value(draw, depth + 1) for _ in range(draw.randrange(4)))}]",
            lambda: "{" + ",".join(f'"k{i}":{hostile_value(draw, depth + 1)}' for i in range(draw.randrange(4))) + "}",
            lambda: draw.choice(NESTED)(draw.choice((40, 70, DEEP))),
        ]
    return draw.choice(kinds)()


def hostile_job(draw: random.Random, name: str, good: dict[str, Any]) -> str:
    """A job made from a good one: a field replaced by anything, or anything in its model's config."""
    job = json.loads(json.dumps(good))
    job["metadata"] |= {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": "7", "generation": 1}
    at = job["spec"]
    while draw.random() < 0.6 and any(isinstance(one, dict) for one in at.values()):
        at = at[draw.choice([key for key, one in at.items() if isinstance(one, dict)])]
    at[draw.choice([*at, "other"])] = "HERE"
    if draw.random() < 0.1:
        job["status"] = "HERE"
    if draw.random() < 0.01:
        job["spec"]["recipe"] = {"long": "x" * LONG}
    text = json.dumps(job)
    while '"HERE"' in text:
        text = text.replace('"HERE"', hostile_value(draw), 1)
    return text
