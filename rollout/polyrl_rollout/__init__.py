"""Generates: the manager that moves samples, the agent beside each engine, the engines. Read next: `manager`."""
