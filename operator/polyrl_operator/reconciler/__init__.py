"""One job at a time: observe, decide, act, write the status.

work_queue   which job is next: one entry per job, back-off, wake-ups
reconciler   the loop around `polyrl.cluster.reconcile`, which decides; one status write per reconcile
executor     actions become requests
events       Events, aggregated
"""
