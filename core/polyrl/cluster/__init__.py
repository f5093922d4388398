"""One PolyRLJob on a cluster, decided in values: what is seen, what follows from it, and what is to be done.

    raw objects ─ observe ─> JobFacts ─ reconcile(facts, memory, now) ─> Decision(actions, status, memory, wake_at)

    seen   what is there, and how each rollout stands
    size   how many rollouts there should be
    fleet  which pods come and go
    story  how it is told: conditions, status, Events
    objects  the children, as they are sent to the API server

The same functions run in the operator, under random fault schedules in tests, and in a simulator.
"""
