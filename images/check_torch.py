"""Proves that the PyTorch of an image computes and learns, and that the engine's imports work: a build step.

Fails the build, with a traceback, where a pod would have failed later.
"""

from __future__ import annotations

import torch
import torch.distributed.checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

LEARNING_RATE = 0.01
ROWS = torch.arange(12).reshape(2, 6)


def main() -> None:
    """Twenty steps on two rows of a tiny model; raises AssertionError if the loss does not fall."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ROWS, labels=ROWS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    assert ContinuousBatchingManager is not None
    for asks_cuda in (torch.cuda.is_current_stream_capturing, lambda: torch.zeros(1, device="cuda")):
        try:
            asks_cuda()
        except (RuntimeError, AssertionError) as error:  # as on any machine without a GPU, and not a crash
            print(str(error).splitlines()[0])
    print(f"torch {torch.__version__}, cuda: {torch.cuda.is_available()}, loss {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
