"""What the ledger does with each message.

    agents      an agent's messages; an engine whose lease runs is believed
    deltas      its tokens, which come in columns
    trainer     the trainer's messages, from its greeting on, and the checks of what it submits

Imported by `ledger` alone; imports scheduling and batching.
"""
