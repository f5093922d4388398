"""From prompts to scored samples.

    supply           keeps each step supplied with groups: numbers, submits, replaces what was dropped
    runner           answers each finished turn with an environment's text or a reward
    from_wire        responses as samples

Loops import `supply` and `from_wire`; only the process itself makes a `runner`.
"""
