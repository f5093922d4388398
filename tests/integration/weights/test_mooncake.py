"""The real transfer engine between processes that die, and with a stranger who writes where chunks lie."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from polyrl.keys import FILE_NAMES, AgentKeys
from polyrl.weights import WeightsRef
from polyrl.weights.lending import LENT_S, SLOT_BYTES, decode_loan
from polyrl.wire.serving import Content
from polyrl_rollout.weights.lent import SLOTS
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staging
from polyrl_rollout.weights.transfer import CHUNKS_AHEAD, STREAMS, PullFailed
from polyrl_trainer.weights.lender import Lender
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.weights.conftest import CHUNK, FILES, Keys, Mooncake, complete

pytestmark = pytest.mark.mooncake
HOST = "127.0.0.1"
PROCESS_S = 60.0

STRANGER = """
import ctypes, mmap, sys
from mooncake.engine import TransferEngine
memory = mmap.mmap(-1, 4096)
here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
memory[:] = b"x" * 4096
engine = TransferEngine()
assert not engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") and not engine.register_memory(here, 4096)
print("ready", flush=True)
for line in sys.stdin:
    target, there = line.split()
    print("wrote", engine.transfer_sync_write(target, here, int(there), 4096), flush=True)
"""

PUBLISHER = """
import os, signal, sys
from pathlib import Path
import torch, msgspec
from polyrl_trainer.weights.lender import Lender
from polyrl_trainer.weights.publisher import WeightPublisher
class Dies(Lender):
    lent = 0
    def lend(self, content):
        self.lent += 1
        if self.lent == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().lend(content)
publisher = WeightPublisher(Path(sys.argv[1]), chunk_bytes=int(sys.argv[2]), lender=Dies("127.0.0.1"))
ref = publisher.publish(0, {"t": torch.arange(1 << 18)}.items(), {})
print("at", msgspec.json.encode(ref).decode(), flush=True)
sys.stdin.read()
"""

RECEIVER = """
import asyncio, os, signal, sys
from pathlib import Path
import msgspec
from polyrl.keys import AgentKeys, read_keys
from polyrl.weights import WeightsRef
from polyrl_rollout.weights.lent import LoanReader
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staging
class Dies(LoanReader):
    def _wait(self, transfer, check):
        if self.chunks >= 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._wait(transfer, check)
ref = msgspec.json.decode(sys.argv[3], type=WeightsRef)
staging = Staging("run", "receiver", Path(sys.argv[2]))
asyncio.run(Puller(read_keys(AgentKeys, Path(sys.argv[1])), staging, reader=Dies()).pull(ref, None))
"""


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"t": torch.randn(1 << 18, generator=torch.Generator().manual_seed(seed))}


async def test_all_chunks_come_by_the_engine(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher], mooncake: Mooncake
) -> None:
    before, known = mooncake.reader.chunks, tensors()
    pulled = await Puller(keys.agent, staging).pull(publishers().publish(0, known.items(), FILES), None)
    assert mooncake.reader.chunks - before == known["t"].nbytes // CHUNK
    async with asyncio.timeout(LENT_S / 2):
        while mooncake.lender._slots._lent:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["t"], known["t"])


async def test_a_chunk_that_was_changed_in_the_window_is_refused_and_comes_sealed(
    keys: Keys,
    staging: Staging,
    publishers: Callable[..., WeightPublisher],
    mooncake: Mooncake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lend = Lender.lend

    def corrupted(lender: Lender, content: Content) -> Content:
        given = lend(lender, content)
        if given.is_loan:
            lender.window[decode_loan(bytes(given.data)).address - lender._address] ^= 1
        return given

    monkeypatch.setattr(Lender, "lend", corrupted)
    before, known = mooncake.reader.false, tensors(1)
    pulled = await Puller(keys.agent, staging).pull(publishers().publish(0, known.items(), FILES), None)
    assert mooncake.reader.false > before
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["t"], known["t"])


@pytest.mark.parametrize("into", ["publisher", "receiver"])
async def test_a_stranger_may_write_into_registered_memory_and_the_hash_notices(
    into: str,
    keys: Keys,
    staging: Staging,
    publishers: Callable[..., WeightPublisher],
    mooncake: Mooncake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, one_at_a_time = list[str](), threading.Lock()

    def write(stranger: subprocess.Popen[str], port: int, address: int) -> None:
        assert stranger.stdin is not None
        print(f"{HOST}:{port}", address, file=stranger.stdin, flush=True)
        written.append(answer_of(stranger, "wrote"))

    lend, reader = Lender.lend, mooncake.reader
    wait = reader._wait

    def written_when_lent(lender: Lender, content: Content) -> Content:
        given = lend(lender, content)
        with one_at_a_time:
            if given.is_loan and not written:
                write(stranger, lender.port, decode_loan(bytes(given.data)).address)
        return given

    def written_when_come(transfer: int, check: Callable[[], None]) -> bool:
        came = wait(transfer, check)
        with one_at_a_time:
            if not written:
                for slot in range(SLOTS):
                    write(stranger, reader._engine.get_rpc_port(), reader._address + slot * SLOT_BYTES)
        return came

    with started(STRANGER) as stranger:
        answer_of(stranger, "ready")
        if into == "publisher":
            monkeypatch.setattr(Lender, "lend", written_when_lent)
        else:
            monkeypatch.setattr(reader, "_wait", written_when_come)
        before, known = reader.false, tensors(2)
        pulled = await Puller(keys.agent, staging).pull(publishers().publish(0, known.items(), FILES), None)
    assert set(written) == {"0"}, "the engine lets a stranger write"
    assert reader.false > before
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["t"], known["t"])


@contextmanager
def started(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answer_of(process: subprocess.Popen[str], word: str) -> str:
    """The engine logs on the same output."""
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith(word))
    return line.removeprefix(word).strip()


async def test_a_publisher_that_dies_while_it_lends_leaves_no_half_version(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    # Whoever is asked for more than is asked for at once has given some.
    asked = STREAMS * CHUNKS_AHEAD + 1
    with started(PUBLISHER, str(keys.trainer_file), str(CHUNK), str(asked)) as process:
        ref = msgspec.json.decode(answer_of(process, "at"), type=WeightsRef)
        with pytest.raises(PullFailed, match="gave nothing"):
            await Puller(keys.agent, staging, silence_s=0.5, progress_s=2.0).pull(ref, None)
        assert process.wait(PROCESS_S) == -9
    assert not complete(staging)
    known = {"t": torch.arange(1 << 18)}
    pulled = await Puller(keys.agent, staging).pull(publishers().publish(0, known.items(), {}), None)
    assert pulled.bytes_pulled < known["t"].nbytes, "what had come was kept"
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["t"], known["t"])


async def test_a_receiver_that_dies_costs_the_publisher_and_others_nothing(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher], tmp_path: Path
) -> None:
    ref, folder = publishers().publish(0, tensors(3).items(), FILES), tmp_path / "dies"
    folder.mkdir()
    agent = keys.trainer_file.with_name(FILE_NAMES[AgentKeys])
    argv: list[Any] = [sys.executable, "-c", RECEIVER, agent, folder, msgspec.json.encode(ref).decode()]
    process = await asyncio.create_subprocess_exec(*map(os.fspath, argv))
    assert await asyncio.wait_for(process.wait(), PROCESS_S) == -9
    pulled = await Puller(keys.agent, staging).pull(ref, None)
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["t"], tensors(3)["t"])
