"""What a run has trained, taken out of its folder or off a cluster, or tried where it lies.

sealed     the files of a checkpoint's model, each with its size and checksum
export     `polyrl export`
generate   `polyrl generate`
get        `polyrl get`: the same from a cluster
"""
