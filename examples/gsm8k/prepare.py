"""Make this example's inputs from rows of {"question", "answer"}, the format of openai/grade-school-math.

    python examples/gsm8k/prepare.py --train train.jsonl.gz --test test.jsonl.gz --out gsm8k-data [--vocabulary 2048]

Writes data/{sft,rl,eval}.jsonl and, with --vocabulary, a byte-level BPE tokenizer trained on the training rows, for a model
made from a config when no pretrained one is at hand. Refuses rows without the final "#### " line. Read next: `reward`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

END = "<|endoftext|>"
PAD = "<|pad|>"
EVAL_ROWS = 256  # enough for a standard error of 3 % at 50 %


def rows(path: Path) -> Iterator[dict[str, str]]:
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if "#### " not in row["answer"]:
                sys.exit(f"{path}:{number}: answer: has no final line '#### <number>'")
            final = row["answer"].rsplit("#### ", 1)[1].strip().replace(",", "")
            yield {"prompt": f"Question: {row['question']}\nAnswer:", "response": " " + row["answer"], "final": final}


def write(path: Path, items: list[dict[str, str]], fields: tuple[str, ...]) -> None:
    path.write_text("".join(json.dumps({f: item[f] for f in fields}) + "\n" for item in items), encoding="utf-8")
    print(f"{path}: {len(items)} rows")


def train_tokenizer(texts: list[str], size: int, folder: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=[END, PAD], show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=PAD)
    fast.save_pretrained(folder)
    print(f"{folder}: {len(fast)} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=0, help="train a BPE tokenizer of this size")
    args = parser.parse_args()
    train, test = list(rows(args.train)), list(rows(args.test))
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    write(args.out / "data/sft.jsonl", train, ("prompt", "response"))
    write(args.out / "data/rl.jsonl", train, ("prompt", "final"))
    write(args.out / "data/eval.jsonl", test[:EVAL_ROWS], ("prompt", "final"))
    if args.vocabulary:
        train_tokenizer([r["prompt"] + r["response"] for r in train], args.vocabulary, args.out / "tokenizer")


if __name__ == "__main__":
    main()
