"""Test kit of the trainer: the conformance suite of backends, and rollouts without a manager.

Tests, and whoever writes a backend of his own, import it; no production code does, and no image carries it.
"""
