"""From prompts to scored samples.

Which groups are submitted, adopted after a restart, filtered, and read back from the wire.
"""
