"""The reward of grade-school maths: the last number of the response is the answer (Cobbe et al. 2021)."""

import re

NUMBER = re.compile(r"(?:(?<![\d)])-)?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")  # "-3" is negative, but "5-3" ends in 3


def score(sample):
    numbers = NUMBER.findall(sample.response)
    right = bool(numbers) and value(numbers[-1]) == value(str(sample.metadata["final"]))
    return {"reward": float(right), "exact_match": float(right), "has_number": float(bool(numbers))}


def value(number):
    return float(number.replace(",", ""))
