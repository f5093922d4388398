"""Low-rank adapters on a frozen model (LoRA, Hu et al. 2021, arXiv 2106.09685), by peft.

The adapters stand in the model's own modules, so that it is called as ever; what is published and served is the merged
model, W + (alpha / rank) B A, computed beside the two and never into W: subtracting again would not give W's bits.
With the adapters off it is the model that the run began with: the reference policy costs no second copy.
peft is imported where it is used: it takes seconds.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import xxhash
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from polyrl.errors import InvalidManifest
from polyrl_trainer.backends.configs import AdapterConfig, Dtype
from polyrl_trainer.backends.models import value_head

TARGETS_FIELD: Final = "spec.recipe.model.lora.targetModules"
NAME: Final = "default"
"""peft's name of a model's only adapter."""
_LORA: Final = ".lora_"
_BASE: Final = ".base_layer."
_PEFT_PREFIX: Final = "base_model.model."
"""Before every name in a file that peft reads."""

FOLDER: Final = "adapter"
"""Below a checkpoint's model: at its top transformers would put the adapter on the merged weights."""
TENSORS_FILE: Final = f"{FOLDER}/adapter_model.safetensors"
CONFIG_FILE: Final = f"{FOLDER}/adapter_config.json"


def target_modules(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Last names of the layers that get an adapter, sorted; all linear ones but the head where none is wanted.

    Raises InvalidManifest for a name that no such layer has.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = (
        name
        for name, one in model.named_modules()
        if isinstance(one, nn.Linear) and one is not head and name != value_head.HEAD
    )
    known = sorted({name.rpartition(".")[2] for name in linear})
    absent = [name for name in wanted if name not in known]
    if absent or not known:
        near = difflib.get_close_matches(absent[0], known, n=1) if absent else []
        hint = f"; did you mean {near[0]}?" if near else ""
        faults = [
            f"{TARGETS_FIELD}: the model has no linear layer {name}, only {', '.join(known) or 'none'}"
            for name in absent
        ]
        raise InvalidManifest(
            [f"{fault}{hint}" for fault in faults] or [f"{TARGETS_FIELD}: the model has no linear layer"]
        )
    return sorted(set(wanted)) or known


def check_targets(config: PretrainedConfig, wanted: Sequence[str]) -> None:
    """Makes the model without a tensor. Raises InvalidManifest for a target that it lacks."""
    model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        target_modules(model.from_config(config), wanted)


def add_adapter(model: PreTrainedModel, config: AdapterConfig, seed: int) -> None:
    """Freezes the model and puts adapters into it, drawn from `seed`; their product is 0, so nothing has changed yet.
    A value head learns beside them, whole. Raises InvalidManifest for a target that the model lacks."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(
            _peft_config(target_modules(model, config.target_modules), config), model, adapter_name=NAME
        )
    if hasattr(model, value_head.HEAD):
        value_head.value_head(model).requires_grad_(True)
    model.train(False)


def hold_frozen_in(model: PreTrainedModel, dtype: Dtype, *, values: bool = True) -> None:
    """Frozen linear layers in the dtype of the forward pass: what autocast would make of them at every pass anyway, at
    half the memory. Those whose weights are an embedding's too stay as they are. Without `values` they have none yet,
    and no page of them is touched."""
    held = getattr(torch, dtype)
    shared = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad and id(layer.weight) not in shared:
            for parameter in layer.parameters():
                parameter.data = parameter.to(held) if values else torch.empty_like(parameter, dtype=held)


def base_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model below its adapters, under the names that it has without them."""
    return {name.replace(_BASE, "."): one for name, one in model.state_dict().items() if _LORA not in name}


def whole_product(layer: Any) -> torch.Tensor:
    """What an adapter adds to the weight of its layer."""
    product: torch.Tensor = layer.get_delta_weight(NAME)
    return product


@torch.no_grad()
def merged_state(model: nn.Module, product: Callable[[Any], torch.Tensor] = whole_product) -> dict[str, torch.Tensor]:
    """Tensors of the model with its adapters merged, under the names that it has without, on the CPU; new ones where
    merged, in float32. One layer after the other: a device that has room for the base in two bytes a parameter has
    none for a second one in four."""
    adapted = {f"{name}.weight": layer for name, layer in _adapted_layers(model)}
    return {
        name: (tensor.float() + product(adapted[name]) if name in adapted else tensor).cpu()
        for name, tensor in base_state(model).items()
    }


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What learns, adapters and a scorer's head, under the names of peft's files."""
    return {
        f"{_PEFT_PREFIX}{name.replace(f'.{NAME}.', '.')}": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (_LORA in name or _is_scorer(model))
    }


@torch.no_grad()
def load_adapter(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `adapter_tensors`, of the same names and shapes."""
    for name, parameter in adapter_tensors(model).items():
        parameter.copy_(tensors[name])


def adapter_config(model: nn.Module, config: AdapterConfig) -> bytes:
    """adapter_config.json, as peft reads it."""
    targets = sorted({name.rpartition(".")[2] for name, _ in _adapted_layers(model)})
    settings = _peft_config(targets, config).to_dict()
    settings["target_modules"] = targets
    settings["base_model_name_or_path"] = config.base
    settings["inference_mode"] = True
    if _is_scorer(model):
        settings |= {"task_type": "SEQ_CLS", "modules_to_save": [value_head.HEAD]}
    return json.dumps(settings, indent=2, default=str).encode()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def base_checksum(
    model: nn.Module, pieces: Callable[[torch.Tensor], Iterable[torch.Tensor]] = lambda tensor: (bytes_of(tensor),)
) -> str:
    """xxh3-128 in hex of all that is frozen: adapters are of use on these weights only. `pieces` gives the bytes of a
    parameter, one part after the other."""
    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            digest.update(name.encode())
            for piece in pieces(parameter):
                digest.update(piece.numpy().data)
    return digest.hexdigest()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before `add_adapter`."""
    layers = [layer for _, layer in _adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def dropout_on(model: nn.Module, device: torch.device, drawn: tuple[int, ...]) -> Iterator[None]:
    """The adapters' dropout acts, if they have any. What it leaves out follows from `drawn`, so that another process
    of the run leaves out the same, and no generator of the process moves."""
    layers = [layer.lora_dropout for _, layer in _adapted_layers(model)]
    if not any(isinstance(one, nn.Dropout) for layer in layers for one in layer.modules()):
        yield
        return
    for layer in layers:
        layer.train(True)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(xxhash.xxh3_64_intdigest(repr(drawn).encode()) >> 1)
            yield
    finally:
        for layer in layers:
            layer.train(False)


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, one) for name, one in model.named_modules() if hasattr(one, "lora_dropout"))


def _is_scorer(model: nn.Module) -> bool:
    """A value head stands in place of the vocabulary's, not beside it."""
    return hasattr(model, value_head.HEAD) and model.get_output_embeddings() is None  # type: ignore[operator]


def _peft_config(targets: list[str], config: AdapterConfig) -> Any:
    from peft import LoraConfig

    # peft computes alpha / rank, whatever its type says.
    scale: Any = config.alpha
    dropout = config.dropout
    return LoraConfig(
        r=config.rank, lora_alpha=scale, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
