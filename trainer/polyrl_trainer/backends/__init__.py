"""The learner on PyTorch, behind the port `polyrl_trainer.backend`.

    configs          model, engine, optimizer, checkpoint: what every backend takes
    single_process   `TorchBackend`: one policy, AdamW, CPU or one GPU; made by `create_torch_backend`
    policy           the forward pass in bounded memory, the probe of a new model, the frozen reference
    model_factory    a model from a config or a Hugging Face folder
    packing          sequences of different lengths in the rows of a pass
    training_state   the files of a checkpoint

Loops import `configs`, `single_process` and `policy`; the rest is the backend's own.
"""
