"""Test kit of the trainer: the conformance suite of backends, and rollouts without a manager. No image carries it."""
