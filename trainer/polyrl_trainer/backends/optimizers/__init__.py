"""The optimizer of one model: which it is, where its state lies, and its state as named tensors.

adamw         AdamW, with its moments beside the weights or in the host's memory, in float32 or in 8 bits
blocks        moments in 8 bits
named_state   what is saved of it, and read again
"""
