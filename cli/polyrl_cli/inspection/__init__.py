"""Looks into a run, live or ended: who waits for whom, the life of a sample, the audit of its history."""
