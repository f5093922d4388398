"""A plugin that SGLang's processes load (entry point group `sglang.srt.plugins`): sleep on a CPU, which frees nothing.

On a torch with CUDA SGLang waits for the GPU when it sleeps, also where there is none, and its scheduler dies.
"""

from __future__ import annotations


def load() -> None:
    """Called before arguments are resolved."""
    import torch

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *args, **kwargs: None
