"""What a run shows while it goes on and at its end.

    timeline      fleet.jsonl: what happened to the fleet and when; metrics.jsonl: rows that the trainer writes
    progress      the run as it goes on: a live picture on a terminal, plain lines elsewhere
    prints        what user code prints, for run --show-prints
    summary       summary.json: what a run came to
    panel         the same on the terminal, at the end
    plot          run.png
    terminal      where commands print

`local.run` imports all of it; `timeline` imports nothing of the command line.
"""
