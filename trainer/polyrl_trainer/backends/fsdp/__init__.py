"""The learner of several processes: one model, its gradients and its optimizer in shards (FSDP2), behind the same port.

    leader          rank 0, the trainer's own process: `ShardedBackend`, which says what all ranks do
    __main__        every other rank: does what the leader says, knows tokens and nothing else
    rank_model      what all ranks do at the same time with one model
    sharding        a model from a config or a folder, straight into shards
    rounds          which samples on which rank in which pass, as a value
    commands        what the leader says, as bytes
    ranks           the group: collectives, whom one waits for
    processes       starts the ranks of this machine, and notices their end
    heartbeat       a frozen rank is noticed outside of collectives
    pods            the ranks of other pods, on a cluster
    images          a version's image, which every rank writes its own rows of
    shard_files     one safetensors file that every rank writes and reads its own part of

The loss runs on rank 0 alone: a pass gives logprobs, entropies and values, P numbers each, which are gathered; what the
loss says of them, its gradient by each of these numbers, goes back, and each rank goes on with its own backward pass.
So a loss may be any function, the user's among them, and no rank but the first ever holds a reward or an advantage.
"""
