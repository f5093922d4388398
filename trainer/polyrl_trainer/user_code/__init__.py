"""All that calls the user's functions, in processes of their own, so that nothing in them can hang or slow the trainer.

    loading    `module:function` from the user's folder, refused early when it cannot work
    rewards    asks for a sample's reward, with its deadline; the custom group filter
    pools      the pools of a run
    pool       worker processes, killed at a deadline and replaced
    messages   what goes between pool and worker
    worker     the process that calls
    verdicts   what is returned becomes a number or a typed reason
    episodes   environments as coroutines, replayed after a restart

`generation.runner` calls rewards and episodes; `preparation` loads.
"""
