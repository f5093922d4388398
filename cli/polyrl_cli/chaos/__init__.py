"""Faults on purpose: which there are, how they are asked for, and how they reach a process."""
