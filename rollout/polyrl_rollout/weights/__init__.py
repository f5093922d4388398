"""The receiving side of weights: pulls a version's chunks, verifies them, stages a folder that an engine loads."""
