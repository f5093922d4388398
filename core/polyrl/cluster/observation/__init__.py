"""What is observed of a job: raw objects become facts, facts become signals, signals the state of each rollout.

    raw                        fields of raw objects, any of which may be missing
    facts                      pods, nodes, trainer and manager of one job, as values
    job                        raw objects to facts
    context                    facts, remembered state and time: what every policy reads
    disruption                 what says that a pod is, or will be, taken away
    rollouts                   the state of each rollout pod, and why one failed
    exactly_once               counters of lost pods

Nothing here decides what follows; `scaling`, `fleet` and `reporting` read it.
"""
