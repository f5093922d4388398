"""The embedded engine for CPUs, on transformers' continuous batching, in a process of its own."""
