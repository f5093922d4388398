"""The operator's side of each job's manager: the HTTP client, and the poller that keeps its status fresh."""
