"""The receiving side of weights; the sending side is `polyrl_trainer.weights`, the values are `polyrl.weights`.

    puller     which version an engine gets next, and from a publisher: manifest, missing chunks, checksums
    staging    the folder in memory where a version arrives, and from which the engine loads it

The agent has the engine load what was pulled; tests pull from a real publisher.
"""
