"""What people read of a job.

assessment   all that one reconcile found: the input of the others
conditions   True, False or Unknown, with reason and message
status       the status to store, with the last disruptions and what the job has cost
events       Events on the job
"""
