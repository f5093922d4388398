"""The reward of a program: 1 when what it prints is right for every input, else 0. It runs in `sandbox`, not here."""

from sandbox import run

INPUTS = (0, 3, 11, 250)


def score(sample):
    """A program that fails, hangs or takes too much is a wrong one; a machine that cannot confine it is an error."""
    program = f"for x in {INPUTS}:\n    print({sample.response})"
    outcome = run(program)
    wanted = [str(sample.metadata["times"] * x + sample.metadata["plus"]) for x in INPUTS]
    right = float(outcome.ended and outcome.output.split() == wanted)
    return {"reward": right, "exact_match": right, "ran": float(outcome.ended), "timed_out": float(outcome.timed_out)}
