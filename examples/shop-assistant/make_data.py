"""Writes the data: `sft.jsonl.gz` with demonstrations, `rl.jsonl.gz` and `eval.jsonl.gz` with a shop to ask each.

    python make_data.py [--seed N]

The files beside this script were made with the default seed; making them again changes no row. Most demonstrations
guess the price without asking (`~42`), and are wrong as often as one would think: what they teach is how people talk
here. The rest asks where the thing lies, and what things cost that lie there. All files are packed, so that together
they fit into what `kubectl apply` remembers of a ConfigMap, 256 KiB.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

GOODS = ("fig", "kiwi", "lime", "nut", "pear", "plum")
SHELVES = "abcdefgh"
PRICES = range(10, 100)
ROWS = {"sft": 1000, "rl": 1000, "eval": 256}
GUESSED = 0.65
"""Share of demonstrations that do not ask. More than half: whoever imitates the usual, guesses."""
HERE = Path(__file__).parent


def main() -> None:
    """Draws every row anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1234)
    chance = random.Random(parser.parse_args().seed)
    for name, count in ROWS.items():
        draw = demonstration if name == "sft" else question
        rows = [draw(chance) for _ in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        # Without a time in it, the same rows are the same bytes.
        (HERE / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def question(chance: random.Random) -> dict:
    """A prompt such as `fig>`, and a shop, which the policy does not see: what lies on which shelf, what costs what."""
    shop = dict(zip(GOODS, chance.sample(SHELVES, len(GOODS)), strict=True))
    shop |= {shelf: str(chance.choice(PRICES)) for shelf in shop.values()}
    return {"prompt": f"{chance.choice(GOODS)}>", "shop": shop}


def demonstration(chance: random.Random) -> dict:
    """A conversation in which somebody either guesses, or asks for the shelf, then for its price, and repeats that."""
    row = question(chance)
    turns = [{"role": "user", "content": row["prompt"]}]
    if chance.random() < GUESSED:
        return {"messages": [*turns, {"role": "assistant", "content": f"~{chance.choice(PRICES)}"}]}
    good = row["prompt"].rstrip(">")
    shelf = row["shop"][good]
    price = row["shop"][shelf]
    for asked, answer in ((good, shelf), (shelf, price)):
        turns += [{"role": "assistant", "content": f"?{asked}"}, {"role": "tool", "content": f"={answer};"}]
    return {"messages": [*turns, {"role": "assistant", "content": price}]}


if __name__ == "__main__":
    main()
