"""The layers of a decoder: what is sharded together, and what may be computed twice instead of being kept."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from polyrl.errors import InvalidManifest
from polyrl.manifest.recipe import ActivationCheckpointing

PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm"})
"""Products, of which every second is kept, as torchtitan does: halves what is kept; their time is mostly saved."""
ATTENTION: Final = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)


CPU_COMPILERS: Final = ("g++", "clang++")
CUDA_COMPILERS: Final = ("gcc", "clang")
"""Compilers of inductor, and of what Triton puts around its kernels."""


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """By the names that transformers keeps of what must stay on one device."""
    names = set(model._no_split_modules or ())
    return [module for module in model.base_model.modules() if type(module).__name__ in names]


def checkpoint_blocks(model: PreTrainedModel, which: ActivationCheckpointing) -> None:
    """From here on a block's activations are computed again in the backward pass, of its input (Chen et al. 2016, arXiv
    1604.06174) and what `which` keeps beside it. Names of parameters stay as they are."""
    if which is ActivationCheckpointing.NONE:
        return
    kept: dict[str, Any] = {"context_fn": _keeping} if which is ActivationCheckpointing.SELECTIVE else {}
    for block in decoder_blocks(model):
        # Not transformers' own switch, which acts in train mode only.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **kept)


def compile_blocks(model: PreTrainedModel, backend: str, device: torch.device) -> None:
    """From here on a block is what torch.compile makes of it, in its first pass. After `checkpoint_blocks`, before FSDP
    cuts it. Names stay as they are. Raises InvalidManifest where kernels cannot be made."""
    if not backend:
        return
    compilers = CUDA_COMPILERS if device.type == "cuda" else CPU_COMPILERS
    if backend == "inductor" and not any(map(shutil.which, compilers)):
        raise InvalidManifest(
            [f"spec.recipe.compile: needs a compiler here, one of {', '.join(compilers)}; install one, or leave it off"]
        )
    for block in decoder_blocks(model):
        # One compilation for passes of any length.
        block.compile(backend=backend, dynamic=True)


def _keeping() -> Any:
    """What one pass of one block keeps."""
    return create_selective_checkpoint_contexts(_policy())  # type: ignore[no-untyped-call]


def _policy() -> Callable[..., CheckpointPolicy]:
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_: object, **__: object) -> CheckpointPolicy:
        name = operation.name()
        if name in PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        else:
            kept = name in ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
