"""One job at a time: observe, decide, act, write the status.

work_queue      which job is next: one entry per job, back-off, wake-ups
reconciler      the loop around `polyrl.cluster.reconcile`, which decides
executor        actions become requests
status_writer   one status write per reconcile, only what changed
events          Events, aggregated
"""
