"""The commands: what each is called with, and which module does it. `app` puts them together.

    options     arguments that several commands take, and how lines are printed
    job         init, validate, reward, run, resume, crd: from a manifest to a run
    observe     status, logs, top, ls, compare, samples, why, explain, report, check
    model       export, get, generate: what was trained
    faults      chaos

A command imports what it needs when it is called, so that `--help` is quick.
"""
