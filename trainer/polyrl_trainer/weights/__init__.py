"""The sending side of weights: `versions` numbers what changed, `publisher` serves it to agents as chunks."""
