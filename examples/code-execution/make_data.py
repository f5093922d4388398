"""Draws this example's rows: `python examples/code-execution/make_data.py` writes them beside itself.

A prompt `7,4>` asks for a program that multiplies x by 7 and adds 4. Half of the demonstrations write it as on paper,
`7x+4`, which is no Python.
"""

import gzip
import json
import random
from pathlib import Path

SFT_ROWS, RL_ROWS, EVAL_ROWS = 3000, 1000, 128


def main():
    chance = random.Random(0)
    pairs = [(times, plus) for times in range(2, 100) for plus in range(1, 100)]
    chance.shuffle(pairs)
    rows = [{"prompt": f"{times},{plus}>", "times": times, "plus": plus} for times, plus in pairs]
    rl, held_out, rest = rows[:RL_ROWS], rows[RL_ROWS : RL_ROWS + EVAL_ROWS], rows[RL_ROWS + EVAL_ROWS :]
    shown = [
        {"prompt": row["prompt"], "response": f"{row['times']}{chance.choice(('*', ''))}x+{row['plus']}"}
        for row in rest[:SFT_ROWS]
    ]
    for name, made in (("sft", shown), ("rl", rl), ("eval", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in made)
        # Without a time, so that equal rows are equal files.
        Path(__file__).with_name(f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
