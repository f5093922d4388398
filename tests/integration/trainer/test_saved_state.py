"""What is saved is the state as it was, whatever is learned while it is written."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch

from polyrl.errors import DeadlineExceeded
from polyrl_trainer.backends.saved_state import SavedState, TensorFiles

WAIT_S = 20.0


def test_a_step_beside_a_save_is_not_in_it_and_the_next_save_has_the_same_memory() -> None:
    state, learned = SavedState(WAIT_S), threading.Event()
    weights: Mapping[str, torch.Tensor] = {"w": torch.zeros(3), "turned": torch.arange(6.0).reshape(2, 3).T}
    written: list[list[float]] = []
    places: list[int] = []

    def write(copied: TensorFiles) -> None:
        assert learned.wait(WAIT_S)
        assert all(one.is_contiguous() for one in copied["f"].values()), "as files hold them"
        written.append(copied["f"]["w"].tolist() + copied["f"]["turned"].flatten().tolist())
        places.append(copied["f"]["w"].data_ptr())

    first = state.write({"f": weights}, write)
    weights["w"].add_(1.0)
    weights["turned"].add_(1.0)
    learned.set()
    first.result(WAIT_S)
    state.write({"f": weights}, write).result(WAIT_S)
    assert written == [[0, 0, 0, 0, 3, 1, 4, 2, 5], [1, 1, 1, 1, 4, 2, 5, 3, 6]]
    assert places[0] == places[1]


def test_a_save_waits_for_the_one_before_no_longer_than_its_deadline() -> None:
    state, free = SavedState(0.05), threading.Event()
    state.write({}, lambda copied: assert_waited(free))
    with pytest.raises(DeadlineExceeded, match="the save before to be written"):
        state.write({}, lambda copied: None)
    free.set()


def assert_waited(free: threading.Event) -> None:
    assert free.wait(WAIT_S)


def test_a_failed_write_is_its_future_and_the_next_one_is_tried() -> None:
    def refuse(copied: TensorFiles) -> None:
        raise OSError("disk full")

    state = SavedState(WAIT_S)
    with pytest.raises(OSError, match="disk full"):
        state.write({}, refuse).result(WAIT_S)
    state.write({}, lambda copied: None).result(WAIT_S)
