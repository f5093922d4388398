"""The reward of grade-school maths: 1 for the right answer, 0.1 for a wrong one that ends in a line "#### <number>".

The last number is the answer (Cobbe et al. 2021). The tenth is for a policy that is never right yet: without it all
rewards of its groups are equal, and teach nothing. It is no part of `exact_match`.

A row names its answer in `final`, as prepare.py writes it, or behind the #### of the data set's own column `answer`.
"""

import re

NUMBER = r"(?:(?<![\d)])-)?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?"  # "-3" is negative, but "5-3" ends in 3


def score(sample):
    row, numbers = sample.metadata, re.findall(NUMBER, sample.response)
    answer = value(str(row["final"] if "final" in row else row["answer"].rpartition("####")[2]))
    right = float(bool(numbers) and value(numbers[-1]) == answer)
    form = float(bool(re.search(rf"^#### {NUMBER}\s*\Z", sample.response, re.MULTILINE)))
    return {"reward": max(right, 0.1 * form), "exact_match": right, "final_line": form}


def value(number):
    return float(number.replace(",", ""))
