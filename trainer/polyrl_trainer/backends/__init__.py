"""The learner on PyTorch, behind the port `polyrl_trainer.backend`.

    configs          model, engine, optimizer, checkpoint: what every backend takes
    single_process   `TorchBackend`: one policy, AdamW, CPU or one GPU; made by `create_torch_backend`
    fsdp             the same by several processes, each with a shard of the model
    learners         who makes the learners of a run, the one or the other
    policy           the forward pass in bounded memory, the probe of a new model, the frozen reference
    models           a model from a config or a Hugging Face folder, value heads, adapters
    packing          sequences of different lengths in the rows of a pass
    optimizers       AdamW, its moments beside the weights, on the host or in 8 bits
    updates          an optimizer step and its schedule
    weight_stream    the weights as one stream of bytes, for engines
    training_state   the files of a checkpoint

Loops import `configs`, `learners` and `policy`; the rest is the backends' own.
"""
