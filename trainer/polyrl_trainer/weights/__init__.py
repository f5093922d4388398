"""The sending side of weights: `publisher` numbers what changed, and serves it to agents as chunks."""
