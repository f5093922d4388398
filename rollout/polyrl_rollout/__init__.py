"""Generates: the manager that moves samples, the agent beside each engine, the engines.

    manager     one process per job: the ledger between agents, trainer and operator
    agent       one process beside each engine: assignments in, tokens out
    engines     what generates: the port, the embedded engine for CPUs, SGLang
    weights     pulls a version's chunks, verifies them, stages a folder that an engine loads
    metadata    the clouds' notices that a machine will be taken away
    testing     fakes of engine, agent and metadata service, and the simulation; left out of images

Processes are started by `python -m polyrl_rollout.manager` and `python -m polyrl_rollout.agent`; other packages import
none of it.
"""
