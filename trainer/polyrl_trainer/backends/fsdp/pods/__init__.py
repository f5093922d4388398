"""A learner over several pods: the first pod's process leads, each other pod has one that starts and watches its ranks.

    messages     what two pods tell each other
    link         the connection that they tell it on: authenticated and encrypted by the trainer's key, with heartbeats
    shares       what the first pod asks the others about their shares of weight versions
    other_pods   the first pod's side: who is there, who is gone
    member       the side of another pod: waits for the first, starts ranks, ends as the first one says

The ranks themselves meet at a store of torch's in the first pod and then speak gloo or NCCL with each other, which know
neither keys nor encryption: who reaches these pods is up to the network (docs/explanation/security.md).

One lost rank ends the group: all pods end, and are started again together. It counts once. What a pod says of its own
ranks the first pod counts, by its exit code; a pod that is gone without a word the cluster has counted, or not, by what
became of it; all others end as one that handed over, which counts for nothing.
"""
