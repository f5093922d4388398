"""Which pods there should be, and which actions lead there.

    plan             all about the rollouts of a running job, most urgent first; who is released first
    capacity_split   spot and on-demand: what to create, what to release
    pools            back-off of each pool of machines
    singletons       fixed children, the manager's pod, the trainer's Job
    removal          deletions, by force where a node is dead

How many rollouts are desired is decided in `scaling`.
"""
