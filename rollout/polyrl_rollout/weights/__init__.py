"""The receiving side of weights; the sending side is `polyrl_trainer.weights`, the values are `polyrl.weights`.

    puller     gets one version from a publisher: manifest, missing chunks, checksums
    staging    the folder in memory where a version arrives, and from which the engine loads it

The agent's `versions` decides when to pull; tests pull from a real publisher.
"""
