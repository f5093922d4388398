"""What the operator knows of the cluster: watches and lists fill a cache, and the reconciler reads it.

watch    kopf's watches, and the little that kopf needs for them
resync   lists of everything, whenever a watch may have missed something
cache    objects as facts, by job and by node; deletions under way, and ends that an older list must not undo
"""
