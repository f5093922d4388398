"""The sending side of weights: versions as manifests and chunks, and the publisher that serves them."""
