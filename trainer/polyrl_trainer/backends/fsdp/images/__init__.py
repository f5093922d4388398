"""A version's images, one on each machine, which all ranks fill: each with its own rows, so that none gathers anything.

    mapped   a machine's image in a rank's memory
    rows     which rank writes what, and how rows go to other machines

`polyrl_trainer.weights` makes them, and says which bytes each has.
"""
