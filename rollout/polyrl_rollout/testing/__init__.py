"""Test kit of rollouts: fake agent, engine and metadata service, and the simulation in virtual time.

No image carries it.
"""
