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
from polyrl_trainer.backends.fsdp.ranks import LEADER, Ranks
from polyrl_trainer.backends.training_state import MODEL_FILE, SAFETENSORS_METADATA, check_names
from polyrl_trainer.checkpoints import writing

_NAMES: Final = {
    **{torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"},
    **{torch.int64: "I64", torch.uint8: "U8"},
}
INDEX_FILE: Final = "model.safetensors.index.json"
ALIGNMENT: Final = 4096
"""Bytes to which the header is padded with spaces, as safetensors pads to 8: a page, so that in a file that several
machines write by NFS the leader's has nothing of theirs, which it would write over with zeros."""
LENGTH_BYTES: Final = 8
"""Bytes of the header's length, which stands before it."""


@dataclass(frozen=True)
class HeldRows:
    """What a rank holds of a tensor: whole rows, next to each other."""

    first: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor, rank: int | None = None) -> HeldRows:
        """Rows that `rank`, or this rank, holds: all of a tensor that is not sharded; a scalar is one row."""
        count = tensor.shape[0] if tensor.ndim else 1
        if not isinstance(tensor, DTensor):
            return cls(0, count)
        mesh = tensor.device_mesh
        each = -(-count // mesh.shape[-1])
        place = mesh.get_local_rank(mesh.ndim - 1) if rank is None else rank % mesh.shape[-1]
        first = min(place * each, count)
        return cls(first, min(first + each, count))


def hands_over(tensor: torch.Tensor, rank: int, near: int = LEADER) -> bool:
    """Whether files and versions have what `rank` holds of it from this rank: of several copies the ranks of that in
    which `near` is give their rows, and what is not sharded the leader gives."""
    if not isinstance(tensor, DTensor):
        return rank == LEADER
    ranks = tensor.device_mesh.shape[-1]
    return rank // ranks == near // ranks


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of it, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of all ranks, and which part of it this one writes."""

    dtype: torch.dtype
    shape: torch.Size
    rows: HeldRows
    written: bool
    """Whether this rank writes what it holds; else another one does."""

    @classmethod
    def of(cls, tensor: torch.Tensor, rank: int) -> TensorPlace:
        """The place of what `rank`, which is this one, holds of `tensor`."""
        return cls(tensor.dtype, tensor.shape, rows=HeldRows.of(tensor), written=hands_over(tensor, rank))

    @property
    def size(self) -> int:
        """Bytes of all ranks."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def row_size(self) -> int:
        return self.size // max(1, self.shape[0] if self.shape else 1)


def write_shards(path: Path, places: Mapping[str, TensorPlace], own: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Every rank's writer calls this with the same names and its `own` part of each tensor. It is on the
    disk when this returns. Raises DiskRefused on every rank when a disk refuses on one."""
    header, starts = _header(places)

    def begin() -> None:
        if ranks.leads:
            with writing(path):
                path.write_bytes(header)
                os.truncate(path, len(header) + sum(one.size for one in places.values()))

    ranks.together(begin, saving=True)
    at = {name: len(header) + start for name, start in starts.items()}
    ranks.together(lambda: _write_own(path, places, own, at), saving=True)


def _header(places: Mapping[str, TensorPlace]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where each tensor starts after it."""
    entries: dict[str, object] = {"__metadata__": SAFETENSORS_METADATA}
    starts, at = dict[str, int](), 0
    for name in sorted(places):
        place = places[name]
        end = at + place.size
        entries[name] = {"dtype": _NAMES[place.dtype], "shape": list(place.shape), "data_offsets": [at, end]}
        starts[name], at = at, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, starts


def _write_own(
    path: Path, places: Mapping[str, TensorPlace], own: Mapping[str, torch.Tensor], starts: Mapping[str, int]
) -> None:
    # Never read here: by NFS a page that was read is written whole, with what another machine had in it before.
    with writing(path), open(path, "wb", opener=lambda name, _: os.open(name, os.O_WRONLY)) as file:
        for name, place in places.items():
            if not place.written:
                continue
            file.seek(starts[name] + place.rows.first * place.row_size)
            file.write(own[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
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
    check_names(path, found, into.keys())
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
