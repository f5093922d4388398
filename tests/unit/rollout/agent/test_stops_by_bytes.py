"""However characters are written by bytes, agent and learner end at the first prefix that holds a stop string."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models

from polyrl.sample import Finish
from polyrl.stop_strings import end_of_stop
from polyrl_rollout.agent.stop_strings import Decode, StopStrings
from polyrl_rollout.engines.port import TokenChunk


@dataclass(frozen=True)
class Bytewise:
    """A tokenizer, and the tokens that a text may be written with."""

    decode: Decode
    spellings: Callable[[str], list[list[int]]]
    """Of one character: whole where the vocabulary has it, and by bytes."""
    special: int


@cache
def falling_back() -> Bytewise:
    """As Llama-2, Mistral and Gemma: a token for each byte beside those of words, and one space less at the begin."""
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "▁", "é", "\u7d42"]
    ids = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<s>"])

    def spellings(character: str) -> list[list[int]]:
        by_bytes = [ids[f"<0x{byte:02X}>"] for byte in character.encode()]
        whole = ids.get(character.replace(" ", "▁"))
        return [by_bytes] if whole is None else [by_bytes, [whole], [whole]]

    return Bytewise(made.decode, spellings, ids["<s>"])


@cache
def byte_level() -> Bytewise:
    """As GPT-2, Llama-3 and Qwen: bytes are letters, and a word may begin or end within a character."""
    letters = {byte: made_of(byte) for byte in range(256)}
    words = ["<s>", *letters.values(), *("".join(letters[byte] for byte in pair.encode()) for pair in ("é", "終"))]
    ids = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.BPE(ids, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>"])

    def spellings(character: str) -> list[list[int]]:
        spelled = [letters[byte] for byte in character.encode()]
        whole = ids.get("".join(spelled))
        return [[ids[one] for one in spelled]] + ([] if whole is None else [[whole]])

    return Bytewise(made.decode, spellings, ids["<s>"])


def made_of(byte: int) -> str:
    """GPT-2's letter of a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [one for one in range(256) if one not in plain].index(byte))


def by_prefixes(ids: Sequence[int], stop: Sequence[str], decode: Decode) -> int | None:
    counts = range(1, len(ids) + 1)
    return next((count for count in counts if any(one in decode(ids[:count]) for one in stop)), None)


def sent(ids: list[int], stop: list[str], decode: Decode, sizes: Callable[[], int]) -> int | None:
    watched, begin = StopStrings(stop, decode, []), 0
    while begin < len(ids):
        new = ids[begin : begin + sizes()]
        chunk = watched.cut(TokenChunk(new, [0.0] * len(new), version=0, finish=None))
        if chunk.finish is Finish.STOP:
            return begin + len(chunk.ids)
        begin += len(new)
    return None


def written(dice: random.Random, by: Bytewise, text: str) -> list[int]:
    ids: list[int] = []
    for character in text:
        ids += dice.choice(by.spellings(character))
        ids += [by.special] * (dice.random() < 0.05)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("make", [falling_back, byte_level])
@pytest.mark.parametrize("characters", ["ab \né終𠮷😀", "𠮷終", "😀", "野𠮷", "ab"])
def test_agent_and_learner_end_at_the_first_prefix(make: Callable[[], Bytewise], characters: str) -> None:
    by, dice, ends = make(), random.Random(1), 0
    for _ in range(60):
        text = "".join(dice.choices(characters, k=dice.choice([3, 40, 250])))
        stop = ["".join(dice.choices(characters + "了", k=dice.randint(1, 6))) for _ in range(dice.randint(1, 2))]
        place = dice.randrange(len(text) + 1)
        ids = written(dice, by, text[:place] + dice.choice(["", stop[0]]) + text[place:])
        expected = by_prefixes(ids, stop, by.decode)
        ends += expected is not None
        assert end_of_stop(ids, stop, by.decode) == expected
        for most in (1, 3, 16):
            assert sent(ids, stop, by.decode, lambda most=most: dice.randint(1, most)) == expected  # type: ignore[misc]
    assert 10 < ends < 61


@pytest.mark.parametrize("make", [falling_back, byte_level])
def test_bytes_that_are_no_text_are_read_alike(make: Callable[[], Bytewise]) -> None:
    """Runs of any bytes, a few of them text: what a prefix shows is found, and agent and learner never differ."""
    by, dice = make(), random.Random(2)
    for _ in range(150):
        ids = [dice.choice([dice.randint(1, 256), *by.spellings("a")[-1], *by.spellings("b")[-1]]) for _ in range(200)]
        stop = ["".join(dice.choices("ab", k=dice.randint(1, 4)))]
        expected = by_prefixes(ids, stop, by.decode)
        assert end_of_stop(ids, stop, by.decode) == expected
        assert sent(ids, stop, by.decode, lambda: dice.randint(1, 9)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("text", ["𠮷" * 5000, "ab" * 10_000, "\ufffd"], ids=["bytes", "words", "no text"])
def test_the_cost_grows_with_the_tokens(text: str) -> None:
    by, read = falling_back(), 0
    ids = [200] * 20_000 if text == "\ufffd" else written(random.Random(3), by, text)

    def counted(part: Sequence[int]) -> str:
        nonlocal read
        read += len(part)
        return by.decode(part)

    assert end_of_stop(ids, ["終了b"], counted) is None
    assert read < 1000 * len(ids)
