"""All that calls the user's functions, in processes of their own, so that nothing in them can hang or slow the trainer.

    loading    `module:function` from the user's folder, refused early when it cannot work
    rewards    asks for a sample's reward, with its deadline; the custom group filter
    together   which samples one call judges
    episodes   asks environments for their texts, and replays those that were lost
    pools      the pools of a run
    workers/   the processes, killed at a deadline and replaced
    verdicts   what is returned becomes a number or a typed reason
    frames     where in the user's code an error arose

`generation.runner` calls rewards and episodes; `check` loads.
"""
