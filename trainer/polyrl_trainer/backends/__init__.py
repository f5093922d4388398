"""The learner on PyTorch, behind the port in `polyrl_trainer.backend`.

Model, optimizer, packed batches, training state.
"""
