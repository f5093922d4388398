"""What a run on one machine should do next, as pure functions; the processes are `polyrl_cli.local`'s.

fleet    the port to whatever runs workers, and what it reports of them
planner  which workers to start or stop, and when the run is over
"""
