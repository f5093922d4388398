"""PolyRL's core: what is decided, as values.

Pure on purpose: no sockets, no cluster, no tensors, no clock (`now` is an argument), no environment. The same deciders run
in production, in random-schedule tests and in the simulator; there is no second copy of a rule for any of them.

Read next: `sample` (the nouns), `wire` (what processes say to each other), `ledger` (where every sample lives).
"""
