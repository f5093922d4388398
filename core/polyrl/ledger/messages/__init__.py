"""What the ledger does with each message.

    agents      an agent's messages; an engine whose lease runs is believed
    deltas      its tokens, which come in columns
    trainer     the trainer's messages and the checks of what it submits
    greeting    the trainer's first message, after a break or a restart

Imported by `ledger` alone; imports scheduling and batching.
"""
