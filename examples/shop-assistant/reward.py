"""Is the last thing that the policy wrote the price, whether it asked for it or guessed?"""


def score(sample):
    """1 for the right price, else 0; `asked` is 1 where both look-ups were made, which the reward does not pay for."""
    shop, good = sample.metadata["shop"], sample.prompt.rstrip(">")
    price = shop[shop[good]]
    right = float(sample.response.rpartition(";")[2].lstrip("~") == price)
    asked = float(f"?{good}={shop[good]};?{shop[good]}={price};" in sample.response)
    return {"reward": right, "exact_match": right, "asked": asked}
