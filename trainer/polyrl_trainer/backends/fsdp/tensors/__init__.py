"""What ranks make of tensors in shards, each of its own rows.

adapters   the product of an adapter's matrices, and the checksum of what adapters stand on
"""
