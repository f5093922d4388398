"""Books about one thing each, kept beside the ledger in simulated runs and benchmarks: what is wrong, in a sentence."""
