"""The receiving side of weights; the sending side is `polyrl_trainer.weights`, the values are `polyrl.weights`.

    versions    which version an engine gets next
    puller      one version from its publisher, verified
    transfer    chunks over several connections at once, each by one of several sources
    download    chunks of one version on their way: the plan, and where they are written
    peers       agents that give each other chunks
    stream      one connection
    lent        one whose chunks come by Mooncake
    staging     the folder in memory where a version arrives, and from which the engine loads it
    pages       the file of weights there, and its use by others and by later versions
    shared_folder  the folder of all agents on a machine, and whose turn it is to change it

The agent has the engine load what was pulled; tests pull from a real publisher.
"""
