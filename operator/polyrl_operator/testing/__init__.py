"""Test kit of the operator: `fake_nodes` runs pods and Jobs of an API server that has no kubelet.

Tests and benchmarks import it; no production code does, and no image carries it.
"""
