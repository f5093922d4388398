"""Writes the example's data: `sft.jsonl.gz` with answers, `rl.jsonl` and `eval.jsonl` without.

No prompt is in two files.

    python make_data.py [--seed N]

The files beside this script were made with the default seed; making them again changes no row. The largest is packed,
so that all together fit into what `kubectl apply` remembers of a ConfigMap, 256 KiB.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

ROWS = {"sft": 4000, "rl": 2000, "eval": 512}
"""Enough that SFT sees no row twice in its few steps, and that evaluation is good to about two percent."""

DIGITS = 6
HERE = Path(__file__).parent


def main() -> None:
    """Draws distinct prompts and deals them out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1234)
    numbers = random.Random(parser.parse_args().seed).sample(range(10**DIGITS), sum(ROWS.values()))
    for name, count in ROWS.items():
        drawn, numbers = numbers[:count], numbers[count:]
        lines = [json.dumps(row(f"{number:0{DIGITS}}", answered=name == "sft")) for number in drawn]
        text = "\n".join(lines) + "\n"
        if name == "sft":
            # Without a time in it, the same rows are the same bytes.
            (HERE / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            (HERE / f"{name}.jsonl").write_text(text)


def row(digits: str, *, answered: bool) -> dict[str, str]:
    """One row: the prompt, and its answer where it is to be learned by heart."""
    prompt = {"prompt": f"{digits}>"}
    return {**prompt, "response": "".join(sorted(digits))} if answered else prompt


if __name__ == "__main__":
    main()
