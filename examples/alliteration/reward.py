"""Do the words of a sentence begin with the letter that was asked for, and does it still read like the book?"""

import re
from itertools import pairwise
from pathlib import Path

BOOK = (Path(__file__).parent / "tom-sawyer.txt").read_text().lower().splitlines()
NEIGHBOURS = {pair for sentence in BOOK for pair in pairwise(re.findall(r"[a-z']+", sentence))}
SENTENCE = re.compile(r"([a-z'-]+[,;:]* )*[a-z'-]+[,;:]*[.!?]")
"""Words, and one end."""
LENGTH = range(4, 17)
"""Words of the policy's own, after the two that are given."""


def score(sample):
    """The share of words with the letter, times that of neighbours which are neighbours in the book.

    What is no end of a single sentence, of 4 to 16 words, is worth nothing, and a word counts once.
    """
    words = re.findall(r"[a-z']+", sample.response.lower())
    wanted = {word for word in words if word.startswith(sample.metadata["letter"])}
    letter = len(wanted) / max(len(words), 1)
    fluent = sum(pair in NEIGHBOURS for pair in pairwise(words)) / max(len(words) - 1, 1)
    sentence = SENTENCE.fullmatch(sample.response.strip().lower()) and len(words) in LENGTH
    return {"reward": letter * fluent if sentence else 0.0, "letter": letter, "fluent": fluent}
