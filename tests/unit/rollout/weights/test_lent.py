"""What comes by a transfer engine that anybody may write through: played here, in the memory of this process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

import pytest

from polyrl.errors import UserError
from polyrl.weights import digest
from polyrl.weights.lending import LEAST_LENT, Loan, decode_loan
from polyrl.wire.serving import Content
from polyrl_rollout.weights import lent
from polyrl_rollout.weights.lent import SLOTS, LoanReader
from polyrl_trainer.weights.lender import Lender

HOST = "127.0.0.1"
CHUNK = bytes(range(256)) * (LEAST_LENT // 128)


class PlayedEngine:
    """Reads within this process; what befalls a transfer is `fault`'s."""

    fault: Callable[[int], int] = staticmethod(lambda here: 1)
    """Of the address that was read into; the transfer's status."""

    def initialize(self, *_: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 5100

    def register_memory(self, *_: int) -> int:
        return 0

    def batch_transfer_async_read(self, target: str, here: list[int], there: list[int], sizes: list[int]) -> int:
        assert target == f"{HOST}:5100"
        ctypes.memmove(here[0], there[0], sizes[0])
        return here[0]

    def transfer_check_status(self, transfer: int) -> int:
        return PlayedEngine.fault(transfer)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[PlayedEngine]:
    module = ModuleType("mooncake.engine")
    monkeypatch.setattr(module, "TransferEngine", PlayedEngine, raising=False)
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(PlayedEngine, "fault", staticmethod(lambda here: 1))
    return PlayedEngine


def lent_chunk(lender: Lender, returned: tuple[int, ...] = ()) -> Loan:
    lender.take_back(returned)
    content = lender.lend(Content(memoryview(CHUNK), nullcontext))
    assert content.is_loan
    return decode_loan(bytes(content.data))


def read(reader: LoanReader, loan: Loan) -> bytes:
    place = memoryview(bytearray(len(CHUNK)))
    assert reader.is_ready(HOST)
    reader.fetch(HOST, loan, place, digest(CHUNK), lambda: None)
    return bytes(place)


def test_a_chunk_comes_whole_and_a_small_one_is_not_lent(engine: type[PlayedEngine]) -> None:
    lender, reader = Lender(HOST, slots=1), LoanReader()
    loan = lent_chunk(lender)
    assert read(reader, loan) == CHUNK
    small = Content(memoryview(bytes(LEAST_LENT - 1)), nullcontext)
    assert lender.lend(small) is small
    full = Content(memoryview(CHUNK), nullcontext)
    assert lender.lend(full) is full, "no slot is left: it goes sealed"
    assert read(reader, lent_chunk(lender, (loan.ticket,))) == CHUNK


def test_a_strangers_write_before_the_copy_is_found_by_the_hash_and_one_after_it_changes_nothing(
    engine: type[PlayedEngine],
) -> None:
    lender, reader, read_into = Lender(HOST, slots=4), LoanReader(rest_s=0.0), list[int]()

    def remember(here: int) -> int:
        read_into.append(here)
        return 1

    def write(here: int) -> int:
        ctypes.memset(here, 7, 1)
        return 1

    engine.fault = staticmethod(remember)
    place = memoryview(bytearray(len(CHUNK)))
    assert reader.is_ready(HOST)
    reader.fetch(HOST, lent_chunk(lender), place, digest(CHUNK), lambda: None)
    ctypes.memset(read_into[0], 7, len(CHUNK))
    assert place == CHUNK, "what is believed lies where nobody writes"
    engine.fault = staticmethod(write)
    with pytest.raises(OSError, match="another one"):
        read(reader, lent_chunk(lender))
    assert (reader.false, reader.chunks) == (1, 1)


def test_a_failed_transfer_sends_all_by_the_sealed_connection_for_a_while(engine: type[PlayedEngine]) -> None:
    lender, reader = Lender(HOST, slots=4), LoanReader()
    engine.fault = staticmethod(lambda here: -1)
    with pytest.raises(OSError, match="did not bring it"):
        read(reader, lent_chunk(lender))
    assert not reader.is_ready(HOST)


def test_slots_of_transfers_that_hang_are_not_used_again_while_they_may_be_written(
    engine: type[PlayedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent, "FETCH_S", 0.0)
    lender, reader, asked = Lender(HOST, slots=2 * SLOTS), LoanReader(rest_s=0.0), set[int]()

    def hang(here: int) -> int:
        asked.add(here)
        return 0

    engine.fault = staticmethod(hang)
    for _ in range(SLOTS):
        with pytest.raises(OSError, match="takes longer"):
            read(reader, lent_chunk(lender))
    assert len(asked) == SLOTS
    with pytest.raises(OSError, match="no slot is free"):
        read(reader, lent_chunk(lender))
    engine.fault = staticmethod(lambda here: 1)
    assert read(reader, lent_chunk(lender)) == CHUNK, "they ended"


def test_without_the_engine_a_trainer_says_so_and_a_rollout_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(UserError, match=r"spec\.rollout\.mooncake wants .* leave the field out$"):
        Lender(HOST)
    reader = LoanReader()
    assert not reader.is_ready(HOST)
    assert not reader.is_ready(HOST)
    assert capsys.readouterr().out.count("polyrl[mooncake]") == 1, "it is said once"
