"""All that calls the user's functions, so that nothing in them can hang or end the trainer.

    loading    `module:function` from the user's folder, refused early when it cannot work
    calls      a deadline and a thread for each call
    rewards    what is returned becomes a number or a typed reason; the custom group filter
    episodes   environments as coroutines, replayed after a restart

`generation.runner` calls rewards and episodes; `preparation` loads.
"""
