"""PolyRL's core: what is decided, as values.

Pure on purpose: no sockets, no cluster, no tensors, no clock (`now` is an argument), no environment. The same deciders
run in production, in random-schedule tests and in the simulator; no rule has a second copy for any of them.

Read next: `sample` (the nouns), `wire` (what processes say to each other), `ledger` (where every sample lives).
"""
