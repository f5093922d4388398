"""Agents of one machine fetch a version once, whoever of them dies, and believe each other nothing."""

from __future__ import annotations

import asyncio
import fcntl
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from polyrl.weights import WeightsRef
from polyrl.wire import GetChunk, GetLent
from polyrl_rollout.weights import puller as pulling
from polyrl_rollout.weights.pages import WEIGHTS_FILE
from polyrl_rollout.weights.puller import Pulled, Puller
from polyrl_rollout.weights.shared_folder import sweep
from polyrl_rollout.weights.staging import Staged, Staging
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.weights.conftest import FILES, Keys

AGENTS = 3
CHUNK = 512
WAIT_S = 30.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(5000, generator=torch.Generator().manual_seed(seed))}


class Machine:
    """Agents that share a folder, and a publisher that counts what it is asked for."""

    def __init__(self, keys: Keys, folder: Path, publisher: WeightPublisher) -> None:
        self._keys, self.folder, self.publisher = keys, folder, publisher
        self.asked = Counter[bytes]()
        self.stagings: list[Staging] = []
        find = publisher.server.find

        def counted(request):
            if isinstance(request, GetChunk | GetLent) and request.hash:
                self.asked[request.hash] += 1
            return find(request)

        publisher.server.find = counted

    def agent(self) -> Puller:
        self.stagings.append(Staging("run", "key", self.folder))
        return Puller(self._keys.agent, self.stagings[-1], silence_s=1.0)

    def publish(self, version: int, seed: int) -> WeightsRef:
        return self.publisher.publish(version, weights(seed).items(), FILES)

    def chunks(self, version: int) -> set[bytes]:
        return {chunk.hash for chunk in self.publisher._kept[version].manifest.chunks}

    def close(self) -> None:
        for staging in self.stagings:
            staging.close()


@pytest.fixture
def machine(keys: Keys, tmp_path: Path, publishers: Callable[..., WeightPublisher]) -> Iterator[Machine]:
    (tmp_path / "shm").mkdir()
    machine = Machine(keys, tmp_path / "shm", publishers(chunk_bytes=CHUNK))
    yield machine
    machine.close()
    assert not list((tmp_path / "shm").iterdir()), "the last one leaves nothing"


def inode(staged: Staged) -> int:
    return (staged.folder / WEIGHTS_FILE).stat().st_ino


def assert_is(staged: Staged, seed: int) -> None:
    assert torch.equal(load_file(staged.folder / WEIGHTS_FILE)["w"], weights(seed)["w"])


async def test_each_chunk_leaves_the_publisher_once_and_lies_here_once(machine: Machine) -> None:
    agents, served = [machine.agent() for _ in range(AGENTS)], [None] * AGENTS
    files = set()
    for version in range(4):
        ref = machine.publish(version, version)
        pulls: list[Pulled] = await asyncio.gather(*map(Puller.pull, agents, [ref] * AGENTS, served))
        served = [pulled.staged for pulled in pulls]
        assert len({inode(staged) for staged in served}) == 1
        assert {staged.receipt for staged in served} == {ref.receipt}
        assert_is(served[0], version)
        assert sorted(pulled.bytes_pulled > 0 for pulled in pulls) == [False, False, True]
        files.add(inode(served[0]))
        for staging in machine.stagings:
            staging.keep_only(version)
    assert set(machine.asked.values()) == {1}
    assert len(files) == 2, "two versions at most"
    joined = await machine.agent().pull(ref, None)
    assert (joined.bytes_pulled, inode(joined.staged)) == (0, inode(served[0]))


async def test_what_one_still_serves_is_not_written(machine: Machine) -> None:
    slow, fast = machine.agent(), machine.agent()
    old = (await slow.pull(machine.publish(0, 0), None)).staged
    served = (await fast.pull(machine.publish(0, 0), None)).staged
    for version in (1, 2, 3):
        served = (await fast.pull(machine.publish(version, version), served)).staged
        machine.stagings[1].keep_only(version)
    assert_is(old, 0)
    assert_is(served, 3)
    assert len(list(machine.stagings[0].root.glob("v*"))) == 3, "what each serves, and pages"


FETCHER = """
import asyncio, sys
from pathlib import Path
import msgspec
from polyrl.keys import AgentKeys, read_keys
from polyrl.weights import WeightsRef
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staging
staging = Staging("run", "key", Path(sys.argv[2]))
ref = msgspec.msgpack.decode(bytes.fromhex(sys.argv[3]), type=WeightsRef)
asyncio.run(Puller(read_keys(AgentKeys, Path(sys.argv[1])), staging).pull(ref, None))
"""


class Fetcher:
    """An agent in a process of its own, which has begun to fetch and gets no more."""

    def __init__(self, machine: Machine, keys: Keys, ref: WeightsRef) -> None:
        begun, self.release, find = threading.Event(), threading.Event(), machine.publisher.server.find
        half = len(machine.chunks(ref.version)) // 2

        def stalls(request):
            if isinstance(request, GetChunk | GetLent) and sum(machine.asked.values()) >= half:
                begun.set()
                return None if self.release.wait(WAIT_S) and not self.live else find(request)
            return find(request)

        machine.publisher.server.find = stalls
        self.live = False
        files = [str(keys.trainer_file.with_name("agent.key")), str(machine.folder)]
        argv = [sys.executable, "-c", FETCHER, *files, msgspec.msgpack.encode(ref).hex()]
        self.process = subprocess.Popen(argv)
        try:
            assert begun.wait(WAIT_S)
        finally:
            machine.publisher.server.find = find

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.release.set()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


async def test_one_that_is_killed_leaves_what_came_to_the_next(machine: Machine, keys: Keys) -> None:
    ref = machine.publish(0, 0)
    fetcher, agent = Fetcher(machine, keys, ref), machine.agent()
    waiting = asyncio.create_task(agent.pull(ref, None))
    fetcher.end(signal.SIGKILL)
    pulled = await asyncio.wait_for(waiting, WAIT_S)
    fetcher.close()
    assert_is(pulled.staged, 0)
    whole = 4 * len(weights(0)["w"])
    assert 0 < pulled.bytes_pulled < 0.8 * whole, "half had come"


async def test_one_that_is_frozen_holds_up_nobody(
    machine: Machine, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "FROZEN_S", 0.3)
    ref = machine.publish(0, 0)
    fetcher, agent = Fetcher(machine, keys, ref), machine.agent()
    fetcher.end(signal.SIGSTOP)
    pulled = await asyncio.wait_for(agent.pull(ref, None), WAIT_S)
    assert_is(pulled.staged, 0)
    fetcher.close()


@pytest.mark.parametrize("name", [WEIGHTS_FILE, "config.json", "more.py"])
async def test_what_another_one_put_there_is_checked_to_the_last_byte(machine: Machine, name: str) -> None:
    first, second = machine.agent(), machine.agent()
    ref = machine.publish(0, 0)
    staged = (await first.pull(ref, None)).staged
    path = staged.folder / name
    content = path.read_bytes() if path.exists() else b"x"
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(content[:-1] + bytes([content[-1] ^ 1]))
    pulled = await second.pull(ref, None)
    assert pulled.staged.folder != staged.folder
    assert_is(pulled.staged, 0)
    assert {path.name for path in pulled.staged.folder.iterdir()} == {WEIGHTS_FILE, "config.json"}


async def test_nobody_else_may_read_or_take_the_folder(machine: Machine) -> None:
    staged = (await machine.agent().pull(machine.publish(0, 0), None)).staged
    modes = {stat.S_IMODE(path.stat().st_mode) for path in staged.folder.parent.rglob("*")}
    assert stat.S_IMODE(staged.folder.parent.stat().st_mode) == 0o700
    assert all(not mode & 0o077 for mode in modes), [oct(mode) for mode in modes]


@pytest.mark.parametrize("kind", ["open to all", "a link"])
def test_a_folder_that_somebody_else_may_change_is_not_joined(tmp_path: Path, kind: str) -> None:
    theirs = tmp_path / "polyrl-run-key"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if kind == "a link":
        theirs.symlink_to(tmp_path / "elsewhere")
    else:
        theirs.mkdir()
        theirs.chmod(0o777)
    with (theirs / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # somebody lives there
        staging = Staging("run", "key", tmp_path)
        assert staging.root != theirs
    assert stat.S_IMODE(staging.root.stat().st_mode) == 0o700
    staging.close()


def test_a_folder_that_somebody_else_may_change_is_left_alone(tmp_path: Path) -> None:
    """Who removes it for them ends at what they nest there, or has no end."""
    theirs = tmp_path / "polyrl-theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    (theirs / ".lock").touch()  # nobody lives there
    sweep(tmp_path)
    assert theirs.exists()
    theirs.chmod(0o700)
    sweep(tmp_path)
    assert not theirs.exists()
