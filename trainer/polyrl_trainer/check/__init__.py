"""Looks at what the user brought before a run does: rows, model config and code. `python -m polyrl_trainer.check`.

    rows     the tokenizer and every row, through the same functions as in a run, all faults instead of the first
    code     reward, filter and environment are imported and the reward is tried on a row

The command line starts it as a process with a deadline, because here user code runs; `polyrl.wire.checks` is what it
reports in.
"""
