"""Make this example's inputs from rows of {"question", "answer"}, the format of openai/grade-school-math.

    python examples/gsm8k/prepare.py --train train.jsonl.gz --test test.jsonl.gz --out FOLDER [--vocabulary 2048]

Writes FOLDER/data/{sft,rl,eval}.jsonl and, with --vocabulary, FOLDER/tokenizer: a byte-level BPE tokenizer trained on
the training rows, for a model made from a config when no pretrained one is at hand.

Nothing is guessed: a row without text, or without a final line "#### <number>", ends it with the file and line, and
nothing is written.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

END: Final = "<|endoftext|>"
PAD: Final = "<|pad|>"
EVAL_ROWS: Final = 256
"""Enough for a standard error of 3 % at 50 %."""
LEAST_VOCABULARY: Final = 256 + 2
"""Every byte, so that any text has a spelling, and the two special tokens."""
FINAL: Final = re.compile(r"-?\d+(\.\d+)?")

Row = dict[str, str]


class BadInput(Exception):
    """One sentence that names file, line and field."""


def read_rows(path: Path) -> list[Row]:
    """All rows of a file as {prompt, response, final}, at least one. Raises BadInput."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, EOFError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise BadInput(f"{path}: holds no rows")
    return rows


def _row(line: bytes, place: str) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{place}: is not a line of JSON in UTF-8: {error}") from error
    question, answer = (_text(fields, name, place) for name in ("question", "answer"))
    _, mark, last = answer.rpartition("#### ")
    final = last.strip().replace(",", "")
    if not mark or not FINAL.fullmatch(final):
        raise BadInput(f"{place}: answer: must end in a line '#### <number>', and ends in {answer[-40:]!r}")
    return {"prompt": f"Question: {question}\nAnswer:", "response": " " + answer, "final": final}


def _text(fields: object, name: str, place: str) -> str:
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise BadInput(f"{place}: {name}: must be text; a row is an object with question and answer")
    return value


def write_rows(path: Path, rows: list[Row], fields: tuple[str, ...]) -> None:
    """JSON lines with only these fields."""
    lines = (json.dumps({name: row[name] for name in fields}, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def train_tokenizer(texts: Iterator[str], size: int, folder: Path) -> None:
    """A Hugging Face folder with a byte-level BPE tokenizer (Sennrich et al. 2016) in which each digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    fast.save_pretrained(folder)
    print(f"{folder}: {len(fast)} tokens")


def prepare(train: Path, test: Path, out: Path, vocabulary: int) -> None:
    """Reads all before it writes any. Raises BadInput."""
    if 0 < vocabulary < LEAST_VOCABULARY:
        raise BadInput(f"--vocabulary: {vocabulary} cannot hold every byte; the least is {LEAST_VOCABULARY}")
    learned, held_out = read_rows(train), read_rows(test)
    (out / "data").mkdir(parents=True, exist_ok=True)
    write_rows(out / "data" / "sft.jsonl", learned, ("prompt", "response"))
    write_rows(out / "data" / "rl.jsonl", learned, ("prompt", "final"))
    write_rows(out / "data" / "eval.jsonl", held_out[:EVAL_ROWS], ("prompt", "final"))
    if vocabulary:
        train_tokenizer((row["prompt"] + row["response"] for row in learned), vocabulary, out / "tokenizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, required=True, help="rows to learn from, .jsonl or .jsonl.gz")
    parser.add_argument("--test", type=Path, required=True, help=f"held-out rows; the first {EVAL_ROWS} are used")
    parser.add_argument("--out", type=Path, required=True, help="folder to write data/ and tokenizer/ into")
    parser.add_argument("--vocabulary", type=int, default=0, help="train a BPE tokenizer of this size")
    args = parser.parse_args()
    try:
        prepare(args.train, args.test, args.out, args.vocabulary)
    except BadInput as bad:
        sys.exit(f"prepare.py: {bad}")


if __name__ == "__main__":
    main()
