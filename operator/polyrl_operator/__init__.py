"""The operator: runs PolyRLJobs as pods. It sees and acts; what to do is decided in `polyrl.cluster`.

    kopf's watches ─> cache ─> work queue (one entry per job) ─> observe ─ reconcile ─> actions, one status write
                                   ^                                                         │
              manager polls, timed wake-ups, resync                     Kubernetes API, drains to managers

    app          what is wired to what; `python -m polyrl_operator --help` lists its options
    api          the Kubernetes API; the command line uses it as well
    informer     what is known of the cluster
    managers     status of, and drains to, each job's manager; a local run uses its client as well
    reconciler   one job at a time
    leader       the Lease; health and metrics are what is seen from outside
    secret       a run's keys and certificate; local runs make their keys with it as well

`app` is above all; reconciler imports informer and managers, and these import api; nothing goes the other way.
"""
