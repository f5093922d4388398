"""A trainer's container with its reserved engines: the trainer and one agent per engine as processes beside each other.

A device plugin lends a GPU to one container only, so whoever shares the trainer's GPUs is a process of its container.
The agents are started again when they end, and end with the trainer, whose exit code is the container's. An agent sees
its own GPUs, and of the environment only what an engine needs: the user's accounts and keys stay the trainer's. Its
lines in the log begin with `[reserved N]`.

    command     the order, from the command line; what an agent is started with; when it is started again
    processes   starts, labels, ends
"""
