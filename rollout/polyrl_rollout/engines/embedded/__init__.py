"""The embedded engine for CPUs, on transformers' continuous batching, in a process of its own.

engine        the port's side, in the agent's process
messages      what it and the engine's process send each other
process       the engine's process, and the model in it
token_draw    draws tokens from logits, each request by its own parameters
"""
