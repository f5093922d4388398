"""What a run on one machine should do next, as pure functions (`planner`); the processes are `polyrl_cli.local`'s.

Imports `polyrl.worker` alone, and shares nothing else with `polyrl.cluster`, which plans pods.
"""
