"""The receiving side of weights; the sending side is `polyrl_trainer.weights`, the values are `polyrl.weights`.

    versions    which version an engine gets next
    puller      one version from its publisher, verified
    transfer    chunks over several connections at once
    stream      one connection
    staging     the folder in memory where a version arrives, and from which the engine loads it
    pages       the file of weights there, and its use by later versions

The agent has the engine load what was pulled; tests pull from a real publisher.
"""
