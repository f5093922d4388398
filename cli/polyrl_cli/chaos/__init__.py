"""Faults on purpose, on a live run: `polyrl chaos`, and what a manifest declares in `spec.faultInjection`.

    kinds         the names on the command line: what is done, to what, in which direction
    faults        a request for a fault, the victim chosen for it, the signals that it takes
    in_container  faults from inside a pod's container: a text of its own, which imports nothing of ours

`local.chaos` and `remote.chaos` inject them.
"""
