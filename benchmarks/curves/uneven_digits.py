"""Sorting as in the example, of as many digits as a prompt happens to have: most have few, some five times as many.

Answers of a policy that people train are as uneven, and what a learner does about it is most of what it costs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

from polyrl_trainer.data.tokenizers import CharacterTokenizer

ALPHABET: Final = "0123456789>"
MEDIAN, SPREAD, LEAST, MOST = 4.0, 0.7, 2, 20
"""Of the digits, which are lognormal."""
LIMIT: Final = MOST + 1
"""Tokens of the longest answer, with its end."""
CONTEXT: Final = 64
ROWS: Final = {"sft": 16_000, "rl": 2000, "eval": 512}


def write_data(folder: Path) -> None:
    """The same rows every time; short ones may be in two files."""
    chance = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in ROWS.items():
        lines = [json.dumps(_row(_digits(chance), answered=name == "sft")) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def data_fields(folder: Path, *names: str) -> dict[str, Any]:
    """`recipe.data` of these files."""
    return {name: [{"path": str(folder / f"{name}.jsonl")}] for name in names}


def learned_batch(folder: Path, prompts: int, group: int, seed: int) -> dict[str, Any]:
    """The first prompts of RL, each with so many right answers, as one optimizer step learns them: JSON values for
    `learner/peers.py`."""
    tokenizer, chance = CharacterTokenizer(ALPHABET), random.Random(seed)
    rows = [json.loads(line)["prompt"] for line in (folder / "rl.jsonl").read_text().splitlines()[:prompts]]
    samples = [
        {
            "prompt": tokenizer.encode_prompt(prompt),
            "response": [*tokenizer.encode_text(_sorted(prompt.rstrip(">"))), tokenizer.eos_id],
            "advantage": chance.gauss(0, 1),
        }
        for prompt in rows
        for _ in range(group)
    ]
    return {"samples": samples, "pairs": [], "limit": LIMIT, "micro_batch": len(samples)}


def _digits(chance: random.Random) -> str:
    count = min(MOST, max(LEAST, round(MEDIAN * chance.lognormvariate(0, SPREAD))))
    return "".join(chance.choices("0123456789", k=count))


def _row(digits: str, *, answered: bool) -> dict[str, str]:
    return {"prompt": f"{digits}>", **({"response": _sorted(digits)} if answered else {})}


def _sorted(digits: str) -> str:
    return "".join(sorted(digits))
