"""A Deltas' rows as plain Python numbers, decoded once per frame: four lists instead of a call per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyrl.wire import ROW_DTYPE, Deltas


def row_columns(rows: bytes) -> tuple[list[int], list[int], list[int], list[int]]:
    """assignment[R], offset[R], count[R], finish[R] of ROW_DTYPE[R]."""
    table = np.frombuffer(rows, dtype=ROW_DTYPE)
    return (
        table["assignment"].tolist(),
        table["offset"].tolist(),
        table["count"].tolist(),
        table["finish"].tolist(),
    )


def pack_rows(rows: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Inverse of `row_columns`, from (assignment, offset, count, finish) per row."""
    return np.array(rows, dtype=ROW_DTYPE).tobytes()


def frame_bytes(deltas: Deltas) -> int:
    """What the columns of a Deltas weigh; its few other numbers are left out."""
    return len(deltas.rows) + len(deltas.ids) + len(deltas.logprobs)
