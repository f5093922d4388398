"""What a job takes of a GPU, by calculation: the one place where bytes are counted.

    sizes         what memory depends on, from a model's config
    known_models  the configs of usual models, for those that are not on this machine
    gpus          the memory of usual GPUs, by name
    moments       what an optimizer remembers of a parameter
    learner       weights, gradients, optimizer, activations, logits, per GPU of one or of many
    engine        weights, keys and values, per GPU of an engine

`polyrl.local` refuses, notes and plans by these sums.
"""
