"""Test kit of core: fakes of a cluster, of an operator around it, and of a fleet.

No image carries it, no production code imports it.
"""
