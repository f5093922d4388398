"""A publisher of several machines: each hashes, encodes and serves its share, and what is published is what one machine
publishes; whoever cannot reach one of them gets its chunks by the first."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec import structs

from polyrl.errors import GroupLost
from polyrl.weights import WeightsRef
from polyrl.weights.deltas import PART_BYTES
from polyrl.weights.fetch_plan import PUBLISHER, REACH_S
from polyrl.weights.shares import chunk_machines
from polyrl.wire import FromPuller
from polyrl.wire.serving import Content, Found
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staging
from polyrl_rollout.weights.transfer import PullFailed
from polyrl_trainer.backend import OtherMachines
from polyrl_trainer.testing.memory_publisher import spread
from polyrl_trainer.weights.forms import WeightsCopy
from polyrl_trainer.weights.publisher import WeightPublisher
from polyrl_trainer.weights.share import ShareServer
from polyrl_trainer.weights.share_commands import GiveChunk, command_of
from tests.integration.weights.conftest import CHUNK, FILES, SEALED_ONLY, Keys
from tests.integration.weights.test_deltas import Tensors, assert_is

pytestmark = SEALED_ONLY


@cache
def first_tensors() -> Tensors:
    """14 MB, so that there are parts of deltas for several machines, most of it in one tensor that is nobody's half.
    Drawn once, since that takes longer than to publish them; nobody changes them."""
    draw = torch.Generator().manual_seed(0)
    rows = {f"layer.{number}": torch.randn(515, 1021, generator=draw).to(torch.bfloat16) for number in range(6)}
    embed = torch.randn(3500, 1027, generator=draw).to(torch.bfloat16)
    return {"embed": embed, "norm": torch.randn(517, generator=draw), "odd": torch.arange(7, dtype=torch.uint8), **rows}


def step(tensors: Tensors, seed: int) -> Tensors:
    """Some words of each large one move by one, and a little of all else."""
    draw = torch.Generator().manual_seed(seed)
    moved = {
        name: (one.view(torch.int16) + (torch.rand(one.shape, generator=draw) < 0.02).to(torch.int16)).view(one.dtype)
        for name, one in tensors.items()
        if one.dtype == torch.bfloat16
    }
    return {**tensors, **moved, "odd": tensors["odd"] + 1, "norm": tensors["norm"] * 1.001}


@dataclass
class Sent:
    """What a machine has given to receivers."""

    find: Callable[[FromPuller], Found]
    bytes: int = 0
    silent: bool = False

    def __call__(self, request: FromPuller) -> Found:
        found = None if self.silent else self.find(request)
        self.bytes += len(found.data) if isinstance(found, Content) else 0
        return found


@dataclass
class Beside(OtherMachines):
    """Machines that are this one, too."""

    servers: list[ShareServer]
    gone: bool = False
    asked: list[int] = field(default_factory=list)
    passes_on_after_s: float = 0.0
    passing_on: list[bytes] = field(default_factory=list)
    most_at_once: int = 0
    """Times that one chunk was asked for, to be passed on."""

    @property
    def number(self) -> int:  # type: ignore[override]
        return len(self.servers)

    def endpoints(self) -> tuple[str, ...]:
        return tuple(server.endpoint for server in self.servers)

    def ask(self, machine: int, request: bytes, within_s: float) -> bytes:
        if self.gone:
            raise ConnectionAbortedError("it did not answer")
        self.asked.append(machine)
        if not isinstance(command := command_of(request), GiveChunk):
            return self.servers[machine].answer(request)
        self.passing_on.append(command.hash)
        self.most_at_once = max(self.most_at_once, self.passing_on.count(command.hash))
        time.sleep(self.passes_on_after_s)
        self.passing_on.remove(command.hash)
        return self.servers[machine].answer(request)

    def lost(self, error: OSError) -> GroupLost:
        return GroupLost(f"lost: {error}")


@dataclass
class World:
    publisher: WeightPublisher
    others: Beside
    sent: list[Sent]
    alone: WeightPublisher

    def publish(self, version: int, tensors: Tensors) -> WeightsRef:
        """By the machines, and by one alone: the same."""
        ref = self.publisher.publish_snapshot(version, self.copy(tensors))
        wanted = self.alone.publish(version, tensors.items(), FILES)
        assert self.publisher._kept[version].body == self.alone._kept[version].body
        assert structs.replace(ref, endpoint=wanted.endpoint, others=()) == wanted
        assert self.publisher.measures == self.alone.measures
        return ref

    def copy(self, tensors: Tensors) -> WeightsCopy:
        return self.publisher.snapshot(lambda room: spread(tensors, room), FILES)

    def shares(self, version: int) -> list[int]:
        """Bytes of chunks that are each machine's."""
        manifest, shares = self.publisher._kept[version].manifest, [0] * len(self.sent)
        for chunk, machine in zip(manifest.chunks, chunk_machines(manifest, len(self.sent)), strict=True):
            shares[machine] += chunk.size
        return shares


@pytest.fixture(params=[2, 3, 5])
def world(request: pytest.FixtureRequest, keys: Keys, publishers: Callable[..., WeightPublisher]) -> Iterator[World]:
    servers = [ShareServer(keys.trainer_file, "tcp://127.0.0.1:*") for _ in range(request.param - 1)]
    others = Beside(servers)
    made, alone = publishers(deltas=True, others=others), publishers(deltas=True)
    sent = []
    for server in (made.server, *(one.server for one in servers)):
        sent.append(Sent(server.find))
        server.find = sent[-1]  # type: ignore[method-assign]
    yield World(made, others, sent, alone)
    for one in servers:
        one.close()


def puller_of(keys: Keys, staging: Staging) -> Puller:
    return Puller(keys.agent, staging, silence_s=1.0, progress_s=5.0)


async def test_versions_are_those_of_one_machine_and_each_sends_its_own(
    world: World, keys: Keys, staging: Staging
) -> None:
    puller, tensors, served = puller_of(keys, staging), first_tensors(), None
    for version in range(6):
        if version == 3:
            tensors = {**tensors, "more": torch.ones(5)}  # another layout: an anchor
        ref, before = world.publish(version, tensors), [one.bytes for one in world.sent]
        kept = world.publisher._kept[version]
        assert kept.manifest.kind == ("anchor" if version in (0, 3) else "delta")
        pulled = await puller.pull(ref, served)
        assert_is(pulled.staged, tensors)
        assert pulled.staged.receipt == ref.receipt
        first, *others = [one.bytes - was for one, was in zip(world.sent, before, strict=True)]
        if version != 3:  # of the layout before some chunks are there already
            assert [first - len(kept.body), *others] == world.shares(version)
        assert pulled.bytes_pulled == first - len(kept.body) + sum(others)
        assert not pulled.bytes_from_peers
        served, tensors = pulled.staged, step(tensors, seed=version)
    if len(world.sent) == 2:
        assert min(world.shares(3)) > PART_BYTES, "shares are alike"


async def test_who_reaches_the_first_alone_has_all_by_it(world: World, keys: Keys, staging: Staging) -> None:
    tensors = first_tensors()
    dead = tuple("tcp://127.0.0.1:1" for _ in world.others.servers)
    world.publish(0, tensors)
    ref = world.publish(1, step(tensors, seed=1))
    pulled = await puller_of(keys, staging).pull(structs.replace(ref, others=dead), None)
    assert_is(pulled.staged, step(tensors, seed=1))
    assert not any(one.bytes for one in world.sent[1:])


async def test_a_machine_that_serves_no_more_is_left_in_the_middle(world: World, keys: Keys, staging: Staging) -> None:
    tensors, last = first_tensors(), world.others.servers[-1].server
    ref = world.publish(0, tensors)
    find = last.find

    def ends(request: FromPuller) -> Found:
        if world.sent[-1].bytes > 3 * CHUNK:
            raise OSError("this connection ends")
        return find(request)

    last.find = ends  # type: ignore[method-assign]
    pulled = await puller_of(keys, staging).pull(ref, None)
    assert_is(pulled.staged, tensors)
    assert 0 < world.sent[-1].bytes < world.shares(0)[-1], "the first gave the rest"


async def test_a_machine_that_keeps_a_version_no_more_is_not_asked_again(
    world: World, keys: Keys, staging: Staging
) -> None:
    ref = world.publish(0, first_tensors())
    world.sent[-1].silent = True
    pulled = await puller_of(keys, staging).pull(ref, None)
    assert_is(pulled.staged, first_tensors())
    assert not world.sent[-1].bytes


async def test_where_the_first_does_not_reach_it_either_the_pull_fails_in_time(
    world: World, keys: Keys, staging: Staging
) -> None:
    ref = world.publish(0, first_tensors())
    world.others.gone = True
    with pytest.raises(PullFailed, match="no longer kept"):
        await puller_of(keys, staging).pull(structs.replace(ref, others=("tcp://127.0.0.1:1",) * len(ref.others)), None)
    with pytest.raises(GroupLost, match="did not answer"):
        world.copy(first_tensors())


def test_no_machine_holds_more_than_is_needed(world: World) -> None:
    """A copy that is dropped, or that nothing rests on any more, is forgotten everywhere, and its memory used again."""
    tensors, images = first_tensors(), [set[int]() for _ in world.others.servers]
    for version in range(7):
        if version == 4:
            tensors = {**tensors, "more": torch.ones(5)}  # an anchor, beside which deltas before it are not needed
        for times in range(2):
            copied = world.copy(tensors)
            if not times:
                world.publisher.drop(copied)
        world.publisher.publish_snapshot(version, copied)
        tensors = step(tensors, seed=version)
        if version == 6:
            assert world.publisher._kept.keys() == {4, 5, 6}
        for server, seen in zip(world.others.servers, images, strict=True):
            copies = server._share._copies
            assert len(copies) <= 3
            seen |= {id(copy.image) for copy in copies.values()}
            assert server._share._deltas.keys() <= world.publisher._kept.keys()
    assert all(len(seen) <= 9 for seen in images), "of 14 copies of two layouts"


async def test_that_a_machine_is_not_reached_is_learned_once(world: World, keys: Keys, staging: Staging) -> None:
    """Not for each of a chain, nor for what is pulled next."""
    tensors, puller = first_tensors(), puller_of(keys, staging)
    dead = tuple("tcp://127.0.0.1:1" for _ in world.others.servers)
    for version in range(6):
        ref, tensors = world.publish(version, tensors), step(tensors, seed=version)
    pulled = await puller.pull(structs.replace(ref, others=dead), None)
    assert REACH_S < pulled.seconds < 5 * REACH_S
    ref = world.publish(6, tensors)
    pulled = await puller.pull(structs.replace(ref, others=dead), pulled.staged)
    assert {*puller._transfer._last.machines} == {PUBLISHER}
    assert_is(pulled.staged, tensors)


async def test_a_machine_that_gives_false_chunks_is_left(world: World, keys: Keys, staging: Staging) -> None:
    """What the first one has of it is right: somebody on the way is not."""
    ref, last = world.publish(0, first_tensors()), world.others.servers[-1].server
    find = last.find

    def lies(request: FromPuller) -> Found:
        found = find(request)
        assert isinstance(found, Content)
        return Content(memoryview(bytes(len(found.data))), nullcontext)

    last.find = lies
    puller = puller_of(keys, staging)
    assert_is((await puller.pull(ref, None)).staged, first_tensors())
    assert puller._left.keys() == {ref.others[-1]}


@pytest.mark.parametrize(
    ("sizes", "learned"),
    [((5_000_000, 600_000), 0.5), ((600_000, 5_000_000), 0.5), ((1_000_000, 1_000_000), 0.5), ((1_000_000,), 1.0)],
    ids=["most at the first", "little at the first", "as much", "nothing at the first"],
)
async def test_how_many_copies_left_the_machines_is_learned_from_what_the_first_one_has(
    keys: Keys, publishers: Callable[..., WeightPublisher], tmp_path: Path, sizes: tuple[int, ...], learned: float
) -> None:
    servers = [ShareServer(keys.trainer_file, "tcp://127.0.0.1:*")]
    made, draw = publishers(deltas=True, others=Beside(servers)), torch.Generator().manual_seed(0)
    tensors = {str(place): torch.randn(size, generator=draw).to(torch.bfloat16) for place, size in enumerate(sizes)}
    ref = made.publish_snapshot(0, made.snapshot(lambda room: spread(tensors, room), FILES))
    for name in "ab":
        (tmp_path / name).mkdir()
        staging = Staging("run", name, tmp_path / name)
        await puller_of(keys, staging).pull(ref, None)
        staging.close()
    made._taken.manifests[0] += 2  # two more asked, and took all from these
    while made.server.is_sending:  # noqa: ASYNC110 - nobody says when
        await asyncio.sleep(0.05)
    made.publish_snapshot(1, made.snapshot(lambda room: spread(tensors, room), FILES))
    assert made._kept[1].facts.anchor_share == learned
    servers[0].close()


async def test_who_is_passed_on_to_holds_up_nobody_else(world: World, keys: Keys, tmp_path: Path) -> None:
    ref = world.publish(0, first_tensors())
    world.others.passes_on_after_s = 0.5
    folders = [tmp_path / name for name in ("alone", "healthy")]
    for folder in folders:
        folder.mkdir()
    alone, healthy = (Staging("run", folder.name, folder) for folder in folders)
    dead = structs.replace(ref, others=("tcp://127.0.0.1:1",) * len(ref.others))
    passed_on = asyncio.create_task(puller_of(keys, alone).pull(dead, None))
    asked = len(world.others.asked)
    while len(world.others.asked) == asked:  # noqa: ASYNC110 - nobody says when
        await asyncio.sleep(0.05)
    assert (await puller_of(keys, healthy).pull(ref, None)).seconds < 2.0
    assert not passed_on.done()
    world.others.passes_on_after_s = 0.0
    assert_is((await passed_on).staged, first_tensors())
    for staging in (alone, healthy):
        staging.close()


async def test_no_chunk_is_asked_for_twice_at_once_to_be_passed_on(world: World, keys: Keys, tmp_path: Path) -> None:
    ref, stagings = world.publish(0, first_tensors()), []
    for name in "abc":
        (tmp_path / name).mkdir()
        stagings.append(Staging("run", name, tmp_path / name))
    world.others.passes_on_after_s = 0.02
    dead = structs.replace(ref, others=("tcp://127.0.0.1:1",) * len(ref.others))
    await asyncio.gather(*(puller_of(keys, staging).pull(dead, None) for staging in stagings))
    assert world.others.most_at_once == 1
    for staging in stagings:
        staging.close()


@pytest.mark.parametrize("rate", [3_000, 20_000])
async def test_a_machine_that_gives_a_trickle_holds_nothing_up(
    world: World, keys: Keys, staging: Staging, rate: int
) -> None:
    ref = world.publish(0, first_tensors())
    with trickling(ref.others[0], rate) as slow:
        async with asyncio.timeout(30):
            others = (slow, *ref.others[1:])
            pulled = await Puller(keys.agent, staging, silence_s=1.0).pull(structs.replace(ref, others=others), None)
    assert_is(pulled.staged, first_tensors())


@contextmanager
def trickling(endpoint: str, rate: int) -> Iterator[str]:
    """Where the same is answered at so many bytes a second for each connection; nothing of it stays."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    ended = threading.Event()

    def pass_on(taken: socket.socket, given: socket.socket, part: int) -> None:
        with suppress(OSError):
            while (data := taken.recv(part)) and not (part < CHUNK and ended.wait(len(data) / rate)):
                given.sendall(data)
        hang_up(taken, given)

    with ExitStack() as opened, ThreadPoolExecutor(max_workers=256) as threads:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def accept() -> None:
            with suppress(OSError):
                while True:
                    near = opened.enter_context(listener.accept()[0])
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                    far = opened.enter_context(socket.create_connection((host, int(port))))
                    ends.extend((near, far))
                    threads.submit(pass_on, near, far, CHUNK)
                    threads.submit(pass_on, far, near, 256)

        ends = [listener]
        accepting = threads.submit(accept)
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            hang_up(listener)
            accepting.result(10.0)
            hang_up(*ends)


def hang_up(*ends: socket.socket) -> None:
    """Whoever waits for one of them ends."""
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
