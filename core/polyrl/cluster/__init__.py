"""One PolyRLJob on a cluster, reconciled in plain values: no sockets, no API client, no clock.

    raw objects -> JobFacts -> reconcile(facts, settings, state, now) -> ReconcileResult(actions, status, state)

    reconcile     the checklist: facts in, actions and status out
    reporting     what people read: conditions, status, Events, cost
    fleet         which pods there should be: singletons, rollouts of both pools, who is released first
    scaling       how many rollouts are desired
    observation   facts of pods, nodes and the manager; what disrupts a pod; the state of each rollout
    resources     the children, as they are sent to the API server
    acceptance, lifecycle    whether the job may run, and where it is in its life
    actions, state, names, timestamps    values that all of these share

A row imports only from rows below it; `lifecycle` stands beside `scaling`, `acceptance` above `fleet`. An operator
imports `reconcile`, `observation.{job,facts}`, `actions`, `state`, `names` and `resources.owner`. Tests run these
under random faults, with `polyrl.testing.fake_cluster` and `fake_operator` around them.
"""
