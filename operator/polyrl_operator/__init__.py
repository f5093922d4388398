"""The operator: runs PolyRLJobs as pods. It sees and acts; what to do is decided in `polyrl.cluster`.

    kopf's watches ─> cache ─> queue (one entry per job) ─> worker: facts ─ reconcile ─> actions, one status write
                                      ^                                                      │
                manager links, timed wake-ups, resync                 Kubernetes API, drain calls

Start it with `python -m polyrl_operator --help`. Read next: `app` (what is wired to what), `worker`.
"""
