"""The children of a job as plain Kubernetes objects: pure functions of the manifest and the operator's settings."""
