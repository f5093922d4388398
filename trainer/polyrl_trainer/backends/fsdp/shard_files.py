"""Tensors of all ranks in one safetensors file: each rank writes its own rows where they belong, and reads its own.

FSDP cuts a tensor by rows, so that what a rank holds is one range of the file's bytes. The file is what a single
process writes, byte for byte of the tensors: any number of ranks reads what any other number wrote, no rank gathers
anything, and every byte is written once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from polyrl.errors import InvalidData
from polyrl_trainer.backends.fsdp.ranks import Ranks
from polyrl_trainer.backends.training_state import MODEL_FILE, SAFETENSORS_METADATA

_NAMES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
INDEX_FILE: Final = "model.safetensors.index.json"
ALIGNMENT: Final = 8
"""Bytes; the header is padded with spaces to it, as safetensors does."""
LENGTH_BYTES: Final = 8
"""Of the header's length, before it."""


@dataclass(frozen=True)
class HeldRows:
    """What a rank holds of a tensor: whole rows, next to each other."""

    first: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HeldRows:
        """Of a tensor that is not sharded, all; a scalar is one row."""
        count = tensor.shape[0] if tensor.ndim else 1
        if not isinstance(tensor, DTensor):
            return cls(0, count)
        mesh = tensor.device_mesh
        each = -(-count // mesh.size())
        first = min(mesh.get_local_rank() * each, count)
        return cls(first, min(first + each, count))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of it, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- writing ----------------------------------------------------------------------------------------------------------


def write_shards(path: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Every rank calls this with the same names; what is not sharded, the leader writes. It is on the disk when this
    returns. Raises OSError or RunFailed on every rank when a disk refuses."""
    header, starts = _header(tensors)

    def begin() -> None:
        if ranks.leads:
            path.write_bytes(header)
            os.truncate(path, len(header) + sum(one.numel() * one.element_size() for one in tensors.values()))

    ranks.together(begin)
    ranks.together(lambda: _write_own(path, tensors, {name: len(header) + at for name, at in starts.items()}, ranks))


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where each tensor starts after it."""
    entries: dict[str, object] = {"__metadata__": SAFETENSORS_METADATA}
    starts, at = dict[str, int](), 0
    for name in sorted(tensors):
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        starts[name], at = at, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, starts


def _write_own(path: Path, tensors: Mapping[str, torch.Tensor], starts: Mapping[str, int], ranks: Ranks) -> None:
    with path.open("r+b") as file:
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor) and not ranks.leads:
                continue
            row_bytes = tensor.numel() * tensor.element_size() // max(1, tensor.shape[0] if tensor.ndim else 1)
            own = local_part(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.seek(starts[name] + HeldRows.of(tensor).first * row_bytes)
            file.write(own.data)
        file.flush()
        os.fsync(file.fileno())


# --- reading ----------------------------------------------------------------------------------------------------------


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file of a model's folder holds which tensor. Raises InvalidData for a folder without weights."""
    index = folder / INDEX_FILE
    try:
        if index.is_file():
            names = json.loads(index.read_bytes())["weight_map"]
            return {name: folder / file for name, file in names.items()}
        with safe_open(folder / MODEL_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / MODEL_FILE)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise InvalidData(f"{folder}: its weights cannot be read: {error}") from error


@torch.no_grad()
def read_shards(files: Mapping[str, Path], into: Mapping[str, torch.Tensor]) -> None:
    """Fills this rank's part of each tensor from the file that is named for it, in the tensor's own dtype.

    Raises InvalidData naming the file that cannot be read, or the tensor of another shape."""
    by_file: dict[Path, list[str]] = {}
    for name in into:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    _read_rows(path, name, file, into[name])
        except (OSError, SafetensorError) as error:
            raise InvalidData(f"{path}: cannot be read: {error}") from error


def read_exactly(path: Path, into: Mapping[str, torch.Tensor]) -> None:
    """`read_shards` of a file that must hold these tensors and no others. Raises InvalidData."""
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise InvalidData(f"{path}: cannot be read: {error}") from error
    if odd := sorted(found ^ into.keys()):
        whose = "has" if odd[0] in found else "lacks"
        raise InvalidData(f"{path}: does not fit this model and optimizer, it {whose} {odd[0]}")
    read_shards(dict.fromkeys(into, path), into)


def _read_rows(path: Path, name: str, file: Any, tensor: torch.Tensor) -> None:
    if not tensor.ndim:
        tensor.copy_(file.get_tensor(name))
        return
    stored = file.get_slice(name)
    if stored.get_shape() != list(tensor.shape):
        raise InvalidData(f"{path}: {name} is {stored.get_shape()}, this run needs {list(tensor.shape)}")
    rows = HeldRows.of(tensor)
    if rows.first < rows.stop:
        local_part(tensor).copy_(stored[rows.first : rows.stop])
