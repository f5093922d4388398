"""Test kit of the operator: nodes without kubelets. No image carries it."""
