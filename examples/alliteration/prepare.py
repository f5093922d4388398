"""Writes what both manifests read, from the sentences beside it: a tokenizer, worked examples, prompts.

    python examples/alliteration/prepare.py

prepared/tokenizer           byte-level BPE trained on the sentences, with a chat template: a Hugging Face folder
prepared/sft.jsonl           openings of sentences, each answered with the rest of its sentence
prepared/{rl,eval}.jsonl     openings with a letter; those of eval.jsonl are from sentences that nothing else holds
"""

import json
import random
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
OUT = HERE / "prepared"
SEED = 1234
VOCABULARY = 2048
LETTERS = "abhistw"
"""With which the book begins most words; worked examples are for each of them."""
WANTED = "s"
"""What RL and evaluation ask for. Forty steps teach one letter; they do not teach to tell seven apart."""
OPENING = 2
"""Words that are given."""
HELD_OUT = 300
"""Sentences that only the evaluation sees, and only the openings of them that no other sentence has."""
EVAL_ROWS = 128
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    """Reads the sentences, and writes everything anew."""
    chance = random.Random(SEED)
    sentences = (HERE / "tom-sawyer.txt").read_text().splitlines()
    chance.shuffle(sentences)
    held_out, learned = sentences[:HELD_OUT], sentences[HELD_OUT:]
    known = {opening(sentence) for sentence in learned}
    worked = [example for sentence in learned for example in worked_examples(sentence)]
    write("sft", worked)
    write("rl", [row(first, WANTED) for first in sorted(known)])
    fresh = sorted({opening(sentence) for sentence in held_out} - known)
    write("eval", [row(first, WANTED) for first in fresh[:EVAL_ROWS]])
    train_tokenizer(example["prompt"] + " " + example["response"] for example in worked)


def opening(sentence: str) -> str:
    """The words that are given, without a comma after the last."""
    return " ".join(sentence.split()[:OPENING]).rstrip(",;")


def row(first: str, letter: str) -> dict:
    """What is asked; the reward reads the letter."""
    return {"prompt": f"Go on with words in {letter}: {first}", "letter": letter}


def worked_examples(sentence: str) -> list[dict]:
    """The sentence as an answer for each letter with which two of its further words begin."""
    rest = " ".join(sentence.split()[OPENING:])
    initials = [word[0] for word in re.findall(r"[a-z']+", rest.lower())]
    letters = [letter for letter in LETTERS if initials.count(letter) > 1]
    return [{"prompt": row(opening(sentence), letter)["prompt"], "response": rest} for letter in letters]


def write(name: str, rows: list[dict]) -> None:
    """JSON lines."""
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.jsonl").write_text("".join(json.dumps(fields) + "\n" for fields in rows))
    print(f"{OUT / name}.jsonl: {len(rows)} rows")


def train_tokenizer(texts) -> None:
    """Byte pairs (Sennrich et al. 2016) over all bytes, so that any text has a spelling."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(OUT / "tokenizer")
    print(f"{OUT / 'tokenizer'}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
