"""Faults on purpose, on a live run: `polyrl chaos`, and what a manifest declares in `spec.faultInjection`.

    kinds         the names on the command line: what is done, to what, in which direction
    faults        a request for a fault, the victim chosen for it, the signals that it takes
    injector      faults on the processes of a local run, and the schedule of those that a manifest declares
    in_container  faults from inside a pod's container: a text of its own, which imports nothing of ours

The local runner imports `faults` and `injector`, `remote.chaos` imports `faults` and `in_container`.
"""
