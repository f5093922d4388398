"""A run on one machine, as pure functions: what it should do next (`planner`), and what memory it needs (`memory`).

The processes are `polyrl_cli.local`'s. Imports the manifest and `polyrl.worker`, nothing of `polyrl.cluster`.
"""
