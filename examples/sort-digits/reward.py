"""Did the policy write the digits of its prompt in ascending order, and nothing else?"""


def score(sample):
    """1 for exactly the sorted digits, 0 for anything else; e.g. prompt "314159>" wants "113459"."""
    exact = float(sample.response == "".join(sorted(sample.prompt.rstrip(">"))))
    return {"reward": exact, "exact_match": exact}
