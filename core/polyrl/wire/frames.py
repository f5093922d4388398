"""Messages to bytes and back, and the checks that bytes must pass. Read next: `polyrl.ledger`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from polyrl.errors import ProtocolError
from polyrl.wire.agent import FINISH_CODES, ROW_DTYPE, Deltas, FromAgent, ToAgent
from polyrl.wire.message import Message
from polyrl.wire.publisher import FromPuller, ToPuller
from polyrl.wire.trainer import FromTrainer, ToTrainer

WIRE_VERSION: Final = 1
"""First byte of every frame; a peer of another version is refused at its first frame."""

MAX_FRAME_BYTES: Final = 64 << 20
"""Largest frame that is decoded: a group of 64 samples of 64k tokens is 50 MB; anything above is an attack or a bug."""


_encoder = msgspec.msgpack.Encoder()
_VERSION_BYTE: Final = bytes([WIRE_VERSION])


def encode(message: Message) -> bytes:
    """One frame."""
    return _VERSION_BYTE + _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes | memoryview) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    if len(frame) < 2 or frame[0] != WIRE_VERSION:
        raise ProtocolError(f"not a frame of wire version {WIRE_VERSION}")
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"undecodable frame: {error}") from error


_from_agent = msgspec.msgpack.Decoder(FromAgent)
_to_agent = msgspec.msgpack.Decoder(ToAgent)
_from_trainer = msgspec.msgpack.Decoder(FromTrainer)
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)
_from_puller = msgspec.msgpack.Decoder(FromPuller)
_to_puller = msgspec.msgpack.Decoder(ToPuller)


def decode_from_agent(frame: bytes | memoryview) -> FromAgent:
    """Raises ProtocolError."""
    message: FromAgent = _decode(_from_agent, frame)
    if isinstance(message, Deltas):
        check_deltas(message)
    return message


def decode_to_agent(frame: bytes | memoryview) -> ToAgent:
    """Raises ProtocolError."""
    message: ToAgent = _decode(_to_agent, frame)
    return message


def decode_from_trainer(frame: bytes | memoryview) -> FromTrainer:
    """Raises ProtocolError."""
    message: FromTrainer = _decode(_from_trainer, frame)
    return message


def decode_to_trainer(frame: bytes | memoryview) -> ToTrainer:
    """Raises ProtocolError."""
    message: ToTrainer = _decode(_to_trainer, frame)
    return message


def decode_from_puller(frame: bytes | memoryview) -> FromPuller:
    """Raises ProtocolError."""
    message: FromPuller = _decode(_from_puller, frame)
    return message


def decode_to_puller(frame: bytes | memoryview) -> ToPuller:
    """Raises ProtocolError."""
    message: ToPuller = _decode(_to_puller, frame)
    return message


def check_deltas(deltas: Deltas) -> None:
    """Column lengths agree and finish codes exist. Raises ProtocolError."""
    if len(deltas.rows) % ROW_DTYPE.itemsize or len(deltas.ids) % 4 or len(deltas.ids) != len(deltas.logprobs):
        raise ProtocolError("delta columns have impossible lengths")
    _, _, counts, finishes = row_columns(deltas.rows)
    if sum(counts) * 4 != len(deltas.ids):
        raise ProtocolError("delta rows count other tokens than the columns hold")
    if max(finishes, default=0) >= len(FINISH_CODES):
        raise ProtocolError("unknown finish code in a delta row")


def delta_rows(deltas: Deltas) -> npt.NDArray[np.void]:
    """ROW_DTYPE[R], a view."""
    return np.frombuffer(deltas.rows, dtype=ROW_DTYPE)


RowColumns: TypeAlias = tuple[list[int], list[int], list[int], list[int]]


@lru_cache(maxsize=1)
def row_columns(rows: bytes) -> RowColumns:
    """assignment[R], offset[R], count[R], finish[R] of ROW_DTYPE[R]: plain numbers, to be read only.

    The newest answer is remembered: whoever looks at a frame on its way through a process shares one decoding of it.
    """
    table = np.frombuffer(rows, dtype=ROW_DTYPE)
    return (
        table["assignment"].tolist(),
        table["offset"].tolist(),
        table["count"].tolist(),
        table["finish"].tolist(),
    )


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids as they travel: uint32 little-endian."""
    return np.asarray(ids, dtype="<u4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.uint32]:
    """uint32[T], a view. Raises ProtocolError when `data` is not whole numbers long."""
    if len(data) % 4:
        raise ProtocolError("token ids are not a multiple of 4 bytes")
    return np.frombuffer(data, dtype="<u4")
