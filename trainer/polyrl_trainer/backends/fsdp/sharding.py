"""A model straight into shards: no rank ever holds the whole of one that comes from a folder; and what is computed of
adapters in shards.

Its tensors are made without a value, so that no page of them is touched; FSDP cuts each block's in turn, and every rank
reads its own rows from the files. A fresh model of a config is drawn whole on every rank first, so that its weights are
those that a single process draws: who starts from nothing starts small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from polyrl.errors import InvalidData
from polyrl.manifest.spec import CpuOffload
from polyrl_trainer.backends.configs import EngineConfig, ModelConfig
from polyrl_trainer.backends.fsdp.images.rows import SENT_BYTES
from polyrl_trainer.backends.fsdp.ranks import LEADER, Ranks
from polyrl_trainer.backends.fsdp.shard_files import HeldRows, hands_over, local_part, read_shards, tensor_files
from polyrl_trainer.backends.models import lora
from polyrl_trainer.backends.models.attention import PACKED_ATTENTION
from polyrl_trainer.backends.models.blocks import checkpoint_blocks, compile_blocks, decoder_blocks
from polyrl_trainer.backends.models.model_factory import attention_for, load_model, load_without_values
from polyrl_trainer.backends.models.sequence_slices import require_heads
from polyrl_trainer.backends.models.value_head import HEAD, HEAD_WEIGHT, add_head, probe_value_model
from polyrl_trainer.backends.policy import (
    RELATIVE_TOLERANCE,
    Policy,
    packing_for,
    probe_model,
    require_like,
    sliced_and_whole,
)

R = TypeVar("R")

HALF_TOLERANCE: Final = 3e-2
"""Tolerance of the probe in bfloat16, which has three digits; a neighbour's influence is a good part of a logit."""


class WholeModel(nn.Module):
    """The root of FSDP's modules: in its forward pass the weights that belong to no block are whole, and each block's
    while it computes."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        """Runs a part of the forward pass."""
        return work()

    def within(self, work: Callable[[], R]) -> R:
        """`forward`; where no backward pass will, it cuts the weights again that FSDP left whole for one."""
        result: R = self(work)
        if not torch.is_grad_enabled():
            cut: Any = self.reshard  # FSDP makes this module one of its own
            cut()
        return result


def sharded_policy(config: ModelConfig, engine: EngineConfig, ranks: Ranks) -> Policy:
    """The policy in shards over the group's mesh; every rank calls this at the same time. Raises InvalidManifest or
    InvalidData on every rank for a source that cannot be trained."""
    model, absent = ranks.together(lambda: _made(config, engine.context_parallel))
    slices = ranks.slices(engine.context_parallel)
    # What slices exchange knows no masks.
    model.set_attn_implementation(attention_for(ranks.device, config.dtype) if slices is None else PACKED_ATTENTION)
    checkpoint_blocks(model, engine.activation_checkpointing)
    ranks.together(lambda: compile_blocks(model, engine.compile_by, ranks.device))
    half = ranks.device.type == "cuda" and config.dtype == "bfloat16"
    offload = engine.cpu_offload is CpuOffload.ALL
    root = shard(model, ranks.mesh(engine.dp_replicate), half=half, offload=offload)
    if isinstance(config.source, Path):
        folder = config.source
        wanted = {name: one for name, one in lora.base_state(model).items() if name not in absent}
        ranks.together(lambda: _read_weights(folder, wanted))
    policy = Policy(
        model=model,
        device=ranks.device,
        # Weights that FSDP hands out in bfloat16 need no autocast.
        dtype="float32" if half else config.dtype,
        packing=packing_for(model, engine.max_tokens_per_micro_batch, engine.context_parallel),
        max_logits_bytes=engine.max_logits_bytes,
        head=config.head,
        within=root.within,
    )
    # Adapters stand on layers that are held in bfloat16, which compute under autocast alone.
    held_half = config.adapter is not None and config.dtype == "bfloat16"
    tolerance = HALF_TOLERANCE if half or held_half else RELATIVE_TOLERANCE
    probe = probe_value_model if config.head == "value" else probe_model
    with torch.no_grad(), policy.autocast() if held_half else nullcontext():
        root.within(lambda: probe(model, ranks.device, tolerance))
        if slices is not None:
            hidden = root.within(lambda: sliced_and_whole(model, ranks.device, slices))
            ranks.together(lambda: require_like(model, *hidden, tolerance=tolerance))
    return policy


def shard(model: PreTrainedModel, mesh: DeviceMesh, *, half: bool, offload: bool = False) -> WholeModel:
    """Cuts every tensor of `model` by rows over the mesh's last dimension, in place. `half`: blocks compute in
    bfloat16, of masters and sums of gradients in float32. `offload`: shards, gradients and the optimizer's state are
    in the host's memory.

    Gradients are summed over the ranks, not averaged: `optim_step` divides them once, by what the caller counts.
    """
    root = WholeModel(model)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else whole
    cut = partial(fully_shard, mesh=mesh)
    if offload:
        cut = partial(cut, offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda"))
    for block in decoder_blocks(model):
        cut(block, mp_policy=precision)
    if half and (head := getattr(model, HEAD, None)) is not None:
        # A score in bfloat16 has three digits.
        cut(head, mp_policy=whole)
    cut(root, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Gloo knows no scaled sum, which a factor other than the number of ranks would else become.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return root


def _made(config: ModelConfig, slices: int) -> tuple[PreTrainedModel, frozenset[str]]:
    """Whole, and the names of what no file of its source holds."""
    given = config.seed, config.dtype, config.special_tokens
    if isinstance(config.source, Path):
        model, drawn = load_without_values(config.source, *given, head=config.head)
    else:
        model, drawn = load_model(config.source, *given, vocabulary=config.vocabulary, head=config.head), False
    require_heads(model.config, slices)
    stored: dict[str, torch.Tensor] = {}
    if revert_weight_conversion(model, stored) is not stored:
        raise InvalidData(
            f"models of type {model.config.model_type} are stored in another form than they compute in, which several"
            " processes cannot read yet; spec.trainer.processesPerPod: 1 can"
        )
    if config.head == "both":
        add_head(model, config.seed)
    if config.adapter is not None:
        lora.add_adapter(model, config.adapter, config.seed)
        lora.hold_frozen_in(model, config.dtype, values=not isinstance(config.source, Path))
    own = {HEAD_WEIGHT} if drawn or config.head == "both" else set()
    return model, frozenset({*own, *model.all_tied_weights_keys})


def _read_weights(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    files = tensor_files(folder)
    if lacking := sorted(into.keys() - files.keys()):
        raise InvalidData(f"{folder}: its weight files lack {len(lacking)} tensors, {lacking[0]} among them")
    read_shards({name: files[name] for name in into}, into)


def product_of_rows(layer: Any) -> torch.Tensor:
    """`lora.whole_product` in shards; every rank calls this at the same time. An adapter's second matrix is cut by
    the rows of the weight that it changes, so a rank needs its own rows of that one, and the first, which is thin,
    whole."""
    first, second = layer.lora_A[lora.NAME].weight, layer.lora_B[lora.NAME].weight
    rows = second.to_local() @ first.full_tensor() * layer.scaling[lora.NAME]
    shape = torch.Size([second.shape[0], first.shape[1]])
    return DTensor.from_local(
        rows, second.device_mesh, second.placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )


def checksum_below(model: torch.nn.Module, ranks: Ranks) -> str:
    """`lora.base_checksum` of a single process, at the leader; every rank calls this at the same time. All rows go to
    the leader once, a piece at a time, since the sum depends on their order."""

    def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for rank in range(ranks.place.ranks):
            if hands_over(tensor, rank):
                yield from _of_rank(rank, tensor, ranks)

    return lora.base_checksum(model, pieces)


def _of_rank(rank: int, tensor: torch.Tensor, ranks: Ranks) -> Iterator[torch.Tensor]:
    """The leader gets the rows of `rank`, any other rank nothing."""
    rows = HeldRows.of(tensor, rank)
    size = (rows.stop - rows.first) * tensor.element_size() * (tensor.numel() // max(1, tensor.shape[0]))
    if not size:
        return
    own = lora.bytes_of(local_part(tensor)) if rank == ranks.place.rank else torch.empty(size, dtype=torch.uint8)
    for piece in torch.split(own, SENT_BYTES):
        if rank == ranks.place.rank != LEADER:
            ranks.give(piece)
        elif ranks.leads:
            if rank != LEADER:
                ranks.take(piece, rank)
            yield piece
