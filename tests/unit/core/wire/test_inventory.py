"""What an agent says it has: every inventory comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from polyrl.errors import ProtocolError
from polyrl.wire.inventory import Inventory, decode_inventory, encode_inventory, inventory_bytes


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=70), st.booleans())
def test_an_inventory_comes_back_as_it_was(bits: list[tuple[bool, bool]], fetches: bool) -> None:
    held, coming = (np.array(column) for column in zip(*bits, strict=True))
    data = encode_inventory(Inventory(held, coming, fetches=fetches))
    assert len(data) == inventory_bytes(len(bits))
    back = decode_inventory(data, len(bits))
    assert (back.held == held).all()
    assert (back.coming == coming).all()
    assert back.fetches is fetches


@given(st.binary(max_size=20), st.integers(1, 64))
def test_other_bytes_are_none(data: bytes, chunks: int) -> None:
    if len(data) == inventory_bytes(chunks) and data[0] <= 1:
        decode_inventory(data, chunks)
        return
    with pytest.raises(ProtocolError, match=f"not an inventory of {chunks} chunks"):
        decode_inventory(data, chunks)


def test_a_first_byte_that_means_nothing_is_refused() -> None:
    data = bytearray(encode_inventory(Inventory(np.ones(3, np.bool_), np.ones(3, np.bool_), fetches=True)))
    data[0] = 2
    with pytest.raises(ProtocolError, match="not an inventory of 3 chunks"):
        decode_inventory(bytes(data), 3)
