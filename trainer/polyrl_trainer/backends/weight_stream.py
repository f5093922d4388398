"""A model's weights as one stream of bytes: which tensor lies where, in which dtype, and the copying of them there.

The order depends on names and dtypes alone, so every rank of a learner knows the place of each of its rows by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

import torch

from polyrl.errors import ProtocolError
from polyrl.weights import TensorEntry
from polyrl_trainer.backend import BufferOf

DTYPES: Final = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "I16": torch.int16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By safetensors' names."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def stream_places(tensors: Mapping[str, torch.Tensor], serving: torch.dtype | None = None) -> list[TensorEntry]:
    """Widest dtypes first, so that each tensor starts at a multiple of its width; no checksums yet. What has a point
    becomes `serving`, if given. Raises ProtocolError when a dtype has no name."""
    places, offset = list[TensorEntry](), 0
    dtypes = {name: _served_dtype(tensor, serving) for name, tensor in tensors.items()}
    for name in sorted(tensors, key=lambda name: (-dtypes[name].itemsize, name)):
        dtype, shape = dtypes[name], tuple(tensors[name].shape)
        if dtype not in _NAMES:
            raise ProtocolError(f"tensor {name} has dtype {dtype}, which safetensors cannot name")
        size = prod(shape) * dtype.itemsize
        places.append(TensorEntry(name, _NAMES[dtype], shape=shape, offset=offset, size=size, checksum=b""))
        offset += size
    return places


def stream_bytes(places: Sequence[TensorEntry]) -> int:
    """The length of the stream."""
    return places[-1].offset + places[-1].size if places else 0


def tensor_at(stream: memoryview, place: TensorEntry) -> torch.Tensor:
    """The tensor that lies there, sharing the stream's memory."""
    dtype = DTYPES[place.dtype]
    if not place.size:
        return torch.empty(place.shape, dtype=dtype)
    return torch.frombuffer(stream[place.offset : place.offset + place.size], dtype=dtype).view(place.shape)


def write_stream(
    tensors: Mapping[str, torch.Tensor], buffer: BufferOf, serving: torch.dtype | None = None
) -> list[TensorEntry]:
    """Copies whole tensors, from whatever device. Raises ProtocolError as `stream_places` does."""
    places = stream_places(tensors, serving)
    stream = buffer(places).data
    for place in places:
        tensor_at(stream, place).copy_(tensors[place.name].detach())
    return places


def _served_dtype(tensor: torch.Tensor, serving: torch.dtype | None) -> torch.dtype:
    return serving if serving is not None and tensor.is_floating_point() else tensor.dtype
