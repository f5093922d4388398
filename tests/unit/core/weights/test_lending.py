"""Loans, and which slot is whose."""

from __future__ import annotations

import pytest

from polyrl.errors import ProtocolError
from polyrl.weights.lending import LEAST_LENT, LENT_S, SLOT_BYTES, Loan, Slots, decode_loan, encode_loan, start_engine


def test_a_loan_comes_back_as_it_was() -> None:
    loan = Loan(5101, 1 << 40, size=SLOT_BYTES, ticket=2**64 - 1)
    assert decode_loan(encode_loan(loan)) == loan


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encode_loan(Loan(5101, 7, size=SLOT_BYTES, ticket=1))[:-1],
        encode_loan(Loan(0, 7, size=SLOT_BYTES, ticket=1)),
        encode_loan(Loan(5101, 0, size=SLOT_BYTES, ticket=1)),
        encode_loan(Loan(5101, 7, size=SLOT_BYTES + 1, ticket=1)),
        encode_loan(Loan(5101, 7, size=LEAST_LENT - 1, ticket=1)),
    ],
    ids=["nothing", "cut", "no port", "no address", "larger than a slot", "too small to be lent"],
)
def test_what_is_no_loan_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="is none"):
        decode_loan(data)


def test_a_slot_has_one_receiver_until_he_returns_it() -> None:
    slots = Slots(2)
    first, second = slots.take(1, 0.0), slots.take(2, 0.0)
    assert {first, second} == {0, 1}
    assert slots.take(3, 0.0) is None
    slots.give_back((1, 1, 99))
    assert slots.take(3, 0.0) == first
    assert slots.take(4, 0.0) is None, "a ticket counts once"


def test_what_a_dead_receiver_held_is_free_after_a_while_and_his_ticket_worth_nothing() -> None:
    slots = Slots(1)
    assert slots.take(1, 0.0) == 0
    assert slots.take(2, LENT_S - 0.1) is None
    assert slots.take(2, LENT_S) == 0
    slots.give_back((1,))
    assert slots.take(3, LENT_S) is None


@pytest.mark.parametrize(
    ("refuses", "started"),
    [("", True), ("initialize", False), ("register_memory", False)],
    ids=["starts", "does not start", "takes no memory"],
)
def test_an_engine_that_does_not_start_is_found_out_and_devices_mean_rdma(refuses: str, started: bool) -> None:
    calls: list[tuple[object, ...]] = []

    class Engine:
        def initialize(self, *arguments: str) -> int:
            calls.append(arguments)
            return -(refuses == "initialize")

        def get_rpc_port(self) -> int:
            return 5100

        def register_memory(self, *memory: int) -> int:
            calls.append(memory)
            return -(refuses == "register_memory")

    assert start_engine(Engine(), "10.0.0.7", "mlx5_0", (4096, 7)) is started
    assert calls[0] == ("10.0.0.7", "P2PHANDSHAKE", "rdma", "mlx5_0")
    assert refuses == "initialize" or calls[1] == (4096, 7)
    start_engine(Engine(), "10.0.0.7", "", (4096, 7))
    assert ("10.0.0.7", "P2PHANDSHAKE", "tcp", "") in calls
