"""A plugin that SGLang's processes load (entry point group `sglang.srt.plugins`): tensor parallel on a CPU, over gloo.

SGLang makes a NCCL communicator for each group of ranks, also where there is no GPU; this one is there and disabled.
"""

from __future__ import annotations


class _NoCommunicator:
    """What is asked of a communicator that is not used."""

    disabled = True
    available = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


def load() -> None:
    """Called before any group of ranks is made."""
    import torch

    if not torch.cuda.is_available():
        from sglang.srt.distributed.device_communicators import pynccl

        pynccl.PyNcclCommunicator = _NoCommunicator
