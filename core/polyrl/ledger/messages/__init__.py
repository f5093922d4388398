"""What the ledger does with each message: of agents, of the trainer, of a greeting.

Imports scheduling and batching, never the reverse.
"""
