"""A Deltas' rows made of plain numbers, and what a frame weighs. The way back is `wire.row_columns`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyrl.wire import ROW_DTYPE, Deltas


def pack_rows(rows: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Inverse of `row_columns`, from (assignment, offset, count, finish) per row."""
    return np.array(rows, dtype=ROW_DTYPE).tobytes()


def frame_bytes(deltas: Deltas) -> int:
    """What the columns of a Deltas weigh; its few other numbers are left out."""
    return len(deltas.rows) + len(deltas.ids) + len(deltas.logprobs)
