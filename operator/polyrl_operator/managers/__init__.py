"""The operator's side of each job's manager.

client   requests over HTTP, with the certificate of the run pinned
poller   one long-poll per manager, and drains until they are confirmed
"""
