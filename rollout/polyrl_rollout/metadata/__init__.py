"""What a cloud tells a machine about its own end, asked from inside: one file per cloud, one watcher for all.

Read next: `asking`, `watcher`.
"""
