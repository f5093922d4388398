"""A version's one image, which all ranks write: each its own rows, so that none gathers anything.

    mapped   the leader's image in another rank's memory
    rows     which rank writes what, and how rows come from ranks on other machines

`polyrl_trainer.weights.images` makes them.
"""
