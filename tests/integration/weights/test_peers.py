"""Agents that give each other chunks over real sockets: others die, lie, trickle, are strangers or are gone."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polyrl import wire
from polyrl.weights import WeightsRef
from polyrl.weights.fetch_plan import PEER_AHEAD, FetchPlan
from polyrl.weights.neighbours import LONGEST_PAUSE_S, NEIGHBOURS
from polyrl.wire.inventory import Inventory, encode_inventory
from polyrl.wire.roster import Roster
from polyrl.wire.sealing import PeerHandshake, PeerKeys
from polyrl.wire.serving import Content
from polyrl_rollout.weights.peers.offers import UNDIALLED_S
from polyrl_rollout.weights.peers.server import HANDSHAKES, UPLOAD_CORES, UPLOADS, PeerServer
from polyrl_rollout.weights.peers.streams import MAX_MISSES
from polyrl_rollout.weights.peers.swarm import Swarm
from polyrl_rollout.weights.puller import Pulled, Puller
from polyrl_rollout.weights.staging import Staging
from polyrl_rollout.weights.stream import WeightStream
from polyrl_rollout.weights.transfer import PullFailed
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.weights.conftest import FILES, Keys
from tests.integration.weights.test_weight_plane_faults import held

CHUNKS = 24
PULLED_S = 30.0
"""1.5 MB, on crowded cores."""
SILENCE_S = 1.0
SLOW_S = 0.4


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(CHUNKS << 15, generator=draw).to(torch.bfloat16)}


Find: TypeAlias = Callable[[wire.FromPeer], Content | None]


class Fleet:
    """Agents of one run and the manager's list of them."""

    def __init__(self, keys: Keys, folder: Path) -> None:
        self._keys, self._folder, self.roster = keys, folder, Roster()
        self.swarms: dict[str, Swarm] = {}
        self._closed: list[Staging | PeerServer | socket.socket] = []

    def agent(self, name: str, least_bytes: int = 0, run_epoch: int = 1) -> Puller:
        swarm = self.swarms[name] = Swarm(name, 0, "127.0.0.1", least_bytes, SILENCE_S)
        staging = Staging("run", name, self._folder)
        self._closed.append(staging)
        self.list(name, swarm.public_key, swarm.port)
        return Puller(self._keys.agent, staging, silence_s=SILENCE_S, progress_s=10.0, swarm=swarm, run_epoch=run_epoch)

    def hidden(self, name: str, find: Find | None = None) -> Puller:
        """An agent that nobody can dial; `find`: it gives what it likes."""
        swarm = self.swarms[name] = Swarm(name, None, silence_s=SILENCE_S)
        if find is not None:
            swarm.server._find = find
        staging = Staging("run", name, self._folder)
        self._closed.append(staging)
        self.list(name, swarm.public_key, swarm.port)
        return Puller(self._keys.agent, staging, silence_s=SILENCE_S, progress_s=10.0, swarm=swarm)

    async def offered(self, name: str, by: str) -> None:
        """Once `name` may ask `by` on a connection that this one has opened."""
        async with asyncio.timeout(PULLED_S):
            while not self.swarms[name].neighbours._known[by].offers:  # noqa: ASYNC110 - threads of theirs
                await asyncio.sleep(0.01)

    def server(self, name: str, find: Find) -> PeerServer:
        """An agent that only gives, and what it likes."""
        keys = PeerKeys.draw()
        server = PeerServer(0, "127.0.0.1", keys, lambda _: True, find)
        self._closed.append(server)
        self.list(name, keys.public, server.port)
        return server

    def frozen(self, name: str) -> None:
        """Its machine takes connections, and its process does nothing with them."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._closed.append(listener)
        self.list(name, PeerKeys.draw().public, listener.getsockname()[1])

    def list(self, name: str, public_key: bytes, port: int) -> None:
        endpoint = f"tcp://127.0.0.1:{port}" if port else ""
        self.roster.welcome(name, wire.Peer(name, public_key, endpoint))
        self.spread()

    def lose(self, name: str) -> None:
        self.roster.remove(name)
        self.spread()

    def spread(self) -> None:
        for name, message in self.roster.messages():
            if name in self.swarms:
                self.swarms[name].update(message)

    def close(self) -> None:
        for part in (*self.swarms.values(), *self._closed):
            part.close()


@pytest.fixture
def fleet(keys: Keys, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(keys, tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def publisher(publishers: Callable[..., WeightPublisher], monkeypatch: pytest.MonkeyPatch) -> WeightPublisher:
    # So that a delta of some kilobytes pays.
    monkeypatch.setattr("polyrl_trainer.weights.server.WeightServer.bandwidth", 1e5)
    publisher = publishers()
    publisher.forms.smallest = 0
    return publisher


def is_right(pulled: Pulled, tensors: dict[str, torch.Tensor]) -> bool:
    loaded = load_file(pulled.staged.folder / "model.safetensors")
    return all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


async def pull(puller: Puller, ref: WeightsRef, served: Pulled | None = None) -> Pulled:
    async with asyncio.timeout(PULLED_S):
        return await puller.pull(ref, served and served.staged)


def sent_by_publisher(pulled: Iterable[Pulled]) -> int:
    return sum(each.bytes_pulled - each.bytes_from_peers for each in pulled)


async def test_joiners_give_each_other_what_the_publisher_sends_about_once(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    ref = publisher.publish(0, weights(0).items(), FILES)
    pullers = [fleet.agent(f"e{number}") for number in range(5)]
    pulled = await asyncio.gather(*(pull(puller, ref) for puller in pullers))
    assert all(is_right(each, weights(0)) for each in pulled)
    assert sent_by_publisher(pulled) <= 2 * pulled[0].staged.manifest.total_bytes


@pytest.mark.parametrize("others", [True, False], ids=["with each other's help", "alone"])
async def test_the_next_version_is_planned_by_the_copies_that_were_sent(
    fleet: Fleet, publisher: WeightPublisher, *, others: bool
) -> None:
    ref = publisher.publish(0, weights(0).items(), FILES)
    pullers = [fleet.agent(f"e{number}", least_bytes=0 if others else 1 << 40) for number in range(5)]
    pulled = await asyncio.gather(*(pull(puller, ref) for puller in pullers))
    await is_at_rest(publisher)
    publisher.publish(1, moved(weights(0), 1).items(), FILES)
    whole, facts = pulled[0].staged.manifest.total_bytes, publisher._kept[1].facts
    assert facts.stale == 5
    assert facts.anchor_share == sent_by_publisher(pulled) / whole / 5
    assert facts.anchor_share <= 2 / 5 if others else facts.anchor_share == 1.0


async def test_what_is_still_sent_tells_nothing_of_copies(fleet: Fleet, publisher: WeightPublisher) -> None:
    """Half a version that five have got of it so far would look like help of each other."""
    ref = publisher.publish(0, weights(0).items(), FILES)
    await pull(fleet.agent("e"), ref)
    publisher._taken.manifests[0] += 4
    with mock.patch("polyrl_trainer.weights.server.WeightServer.is_sending", True):
        publisher.publish(1, moved(weights(0), 1).items(), FILES)
    assert publisher._kept[1].facts.anchor_share == 1.0


async def test_who_asked_and_has_not_taken_a_copy_yet_tells_nothing_of_copies(publisher: WeightPublisher) -> None:
    publisher.publish(0, weights(0).items(), FILES)
    publisher._taken.manifests[0] += 4
    publisher.publish(1, moved(weights(0), 1).items(), FILES)
    assert publisher._kept[1].facts.anchor_share == 1.0


async def is_at_rest(publisher: WeightPublisher) -> None:
    async with asyncio.timeout(PULLED_S):
        while publisher.server.is_sending:  # noqa: ASYNC110 - buffers have no event
            await asyncio.sleep(0.01)


def claims_all(request: wire.FromPeer) -> Content | None:
    """What one says that has every chunk."""
    if not isinstance(request, wire.GetHeld):
        return None
    everything = np.ones(CHUNKS, np.bool_)
    return content(encode_inventory(Inventory(everything, everything, fetches=True)))


def content(data: bytes) -> Content:
    return Content(memoryview(data), nullcontext)


def turned(data: bytes) -> bytes:
    """One bit is another one."""
    return data[:999] + bytes([data[999] ^ 4]) + data[1000:]


LIES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a bit turned": lambda right, _: turned(right),
    "cut short": lambda right, _: right[:-1],
    "too long": lambda right, _: right + b"x",
    "another chunk": lambda _, other: other,
    "zeros": lambda right, _: bytes(len(right)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_who_gives_a_false_chunk_is_dropped_named_and_asked_no_more(
    fleet: Fleet, publisher: WeightPublisher, lie: str
) -> None:
    ref, chunks, given = publisher.publish(0, weights(0).items(), FILES), held(publisher), 0

    def find(request: wire.FromPeer) -> Content | None:
        nonlocal given
        if not isinstance(request, wire.GetChunk):
            return claims_all(request)
        given += 1
        others = [data for hash_, data in chunks.items() if hash_ != request.hash]
        return content(LIES[lie](chunks[request.hash], others[0]))

    puller = fleet.agent("e")
    fleet.server("liar", find)
    pulled = await pull(puller, ref)
    assert is_right(pulled, weights(0))
    assert pulled.liars == ("liar",)
    assert pulled.bytes_from_peers == 0
    asked = given
    again = await pull(puller, publisher.publish(1, weights(1).items(), FILES), pulled)
    assert is_right(again, weights(1))
    assert given == asked
    assert again.liars == ()


@dataclass
class Poor:
    """An agent that is worse than none, and how many chunks it was asked for."""

    chunks: dict[bytes, bytes]
    asked: int = 0

    def honest(self, request: wire.FromPeer) -> Content | None:
        return content(self.chunks[request.hash]) if isinstance(request, wire.GetChunk) else claims_all(request)

    def slow(self, request: wire.FromPeer) -> Content | None:
        if isinstance(request, wire.GetChunk):
            time.sleep(SLOW_S)
        return self.honest(request)

    def dying(self, request: wire.FromPeer) -> Content | None:
        if self.asked > 3:
            raise ConnectionAbortedError
        return self.honest(request)

    def find(self, kind: str, request: wire.FromPeer) -> Content | None:
        self.asked += isinstance(request, wire.GetChunk)
        finds: dict[str, Find] = {
            "has nothing": lambda _: None,
            "claims what it lacks": claims_all,
            "gives nonsense for an inventory": lambda _: content(b"nonsense"),
            "dies": self.dying,
            "slow": self.slow,
        }
        return finds[kind](request)


MOST_ASKED = {"has nothing": 0, "claims what it lacks": MAX_MISSES + PEER_AHEAD, "slow": PEER_AHEAD, "dies": 4}
"""Chunks that such an agent is asked for before it is left; none where it has not said that it has any."""


@pytest.mark.parametrize("kind", [*MOST_ASKED, "gives nonsense for an inventory", "frozen"])
async def test_a_source_that_fails_is_left_and_called_no_liar(
    fleet: Fleet, publisher: WeightPublisher, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrl.weights.fetch_plan.ALLOWED_S", SLOW_S / 2)
    ref = publisher.publish(0, weights(0).items(), FILES)
    puller, poor = fleet.agent("e"), Poor(held(publisher))
    if kind == "frozen":
        fleet.frozen("poor")
    else:
        fleet.server("poor", partial(poor.find, kind))
        # Else the publisher may have given everything before the other one has shown what it is.
        of_publisher, expected = FetchPlan._of_publisher, fleet.swarms["e"].neighbours.expected
        monkeypatch.setattr(FetchPlan, "_of_publisher", lambda *about: None if expected() else of_publisher(*about))
    pulled = await pull(puller, ref)
    assert is_right(pulled, weights(0))
    assert pulled.liars == ()
    assert poor.asked <= MOST_ASKED.get(kind, 0)


async def test_a_manifest_of_another_start_of_the_run_is_refused_of_peers_too(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    ref = publisher.publish(0, weights(0).items(), FILES)
    await pull(fleet.agent("left over"), ref)
    publisher.close()
    with pytest.raises(PullFailed, match="version 0 was made in start 1 of the run, and this is start 2"):
        await pull(fleet.agent("e", run_epoch=2), ref)


@pytest.mark.parametrize("liars", [4, 4 * NEIGHBOURS], ids=["a few", "more than are asked at once"])
async def test_a_false_manifest_is_asked_of_others(fleet: Fleet, publisher: WeightPublisher, liars: int) -> None:
    ref = publisher.publish(0, weights(0).items(), FILES)
    await pull(fleet.agent("a"), ref)
    for number in range(liars):
        fleet.server(f"liar-{number}", lambda request: content(b"x") if isinstance(request, wire.GetManifest) else None)
    joiner = fleet.agent("joiner")
    assert (fleet.swarms["joiner"].neighbours.choose(0.0, ()) or "").startswith("liar"), "one of them is asked first"
    publisher.close()
    assert is_right(await pull(joiner, ref), weights(0))


def trickling(request: wire.FromPeer) -> Content | None:
    """A manifest as large as one may be, each frame of it just before its receiver's deadline."""

    @contextmanager
    def late() -> Iterator[None]:
        time.sleep(SILENCE_S / 2)
        yield

    return Content(memoryview(bytes(99 << 20)), late) if isinstance(request, wire.GetManifest) else None


async def test_a_manifest_that_trickles_is_asked_of_others(
    fleet: Fleet, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.peers.streams.MANIFEST_S", SILENCE_S)
    ref = publisher.publish(0, weights(0).items(), FILES)
    await pull(fleet.agent("a"), ref)
    for number in range(4):
        fleet.server(f"trickles-{number}", trickling)
    joiner = fleet.agent("joiner")
    assert (fleet.swarms["joiner"].neighbours.choose(0.0, ()) or "").startswith("trickles"), "one is asked first"
    publisher.close()
    assert is_right(await pull(joiner, ref), weights(0))


async def test_a_publisher_that_is_back_is_asked_again_however_many_manifests_trickle(
    fleet: Fleet, publishers: Callable[..., WeightPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.peers.streams.MANIFEST_S", SILENCE_S)
    before, asked = publishers(), asyncio.Event()
    ref, found = before.publish(0, weights(0).items(), FILES), asyncio.get_running_loop().call_soon_threadsafe

    def find(request: wire.FromPeer) -> Content | None:
        found(asked.set)
        return trickling(request)

    joiner = fleet.agent("joiner")
    for number in range(NEIGHBOURS):
        fleet.server(f"trickles-{number}", find)
    before.close()
    pulling = asyncio.create_task(pull(joiner, ref))
    await asyncio.wait_for(asked.wait(), PULLED_S)
    publishers(f"tcp://127.0.0.1:{before.server.port}").publish(0, weights(0).items(), FILES)
    begun = time.monotonic()
    assert is_right(await pulling, weights(0))
    assert time.monotonic() - begun < NEIGHBOURS / 2 * SILENCE_S, "not after all of them"


async def test_a_pull_is_given_up_in_the_middle_of_a_manifest_that_trickles(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    ref, asked = publisher.publish(0, weights(0).items(), FILES), asyncio.Event()
    found = asyncio.get_running_loop().call_soon_threadsafe

    def find(request: wire.FromPeer) -> Content | None:
        found(asked.set)
        return trickling(request)

    joiner = fleet.agent("joiner")
    fleet.server("trickles", find)
    publisher.close()
    pulling = asyncio.create_task(joiner.pull(ref, None))
    async with asyncio.timeout(PULLED_S):
        await asked.wait()
        pulling.cancel()
        await asyncio.wait({pulling})
    assert pulling.cancelled()


async def test_one_that_claims_to_await_all_for_ever_holds_nobody_up(fleet: Fleet, publisher: WeightPublisher) -> None:
    ref, asked = publisher.publish(0, weights(0).items(), FILES), 0

    def find(request: wire.FromPeer) -> Content | None:
        nonlocal asked
        if not isinstance(request, wire.GetHeld):
            return None
        asked += 1
        nothing = np.zeros(CHUNKS, np.bool_)
        return content(encode_inventory(Inventory(nothing, ~nothing if asked % 2 else nothing, fetches=True)))

    puller = fleet.agent("e")
    fleet.server("liar", find)
    pulled = await pull(puller, ref)
    assert is_right(pulled, weights(0))
    assert sent_by_publisher([pulled]) == pulled.bytes_pulled


async def test_a_joiner_takes_a_chain_of_deltas_of_its_peers_when_the_publisher_is_gone(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    first, served, tensors = fleet.agent("first"), None, weights(0)
    for version in range(4):
        ref = publisher.publish(version, tensors.items(), FILES)
        served = await pull(first, ref, served)
        newest, tensors = tensors, moved(tensors, version)
    assert publisher._kept[3].manifest.kind == "delta"
    joiner = fleet.agent("joiner")
    publisher.close()
    joined = await pull(joiner, ref)
    assert is_right(joined, newest)
    assert joined.bytes_from_peers == joined.bytes_pulled > joined.staged.manifest.stream_bytes
    # What it has it gives on, to one that reaches the joiner alone.
    fleet.swarms["first"].close()
    second = await pull(fleet.agent("second"), ref)
    assert is_right(second, newest)
    assert second.bytes_from_peers == second.bytes_pulled


def moved(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A hundredth of all words by one."""
    draw = torch.Generator().manual_seed(seed)
    words = tensors["a"].view(torch.int16)
    return {"a": (words + (torch.rand(words.shape, generator=draw) < 0.01).to(torch.int16)).view(torch.bfloat16)}


async def test_one_that_dies_in_the_middle_costs_the_others_nothing_but_its_share(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    ref = publisher.publish(0, weights(0).items(), FILES)
    pullers = {name: fleet.agent(name) for name in ("a", "b", "c")}
    dying = asyncio.create_task(pull(pullers.pop("c"), ref))
    pulling = [asyncio.create_task(pull(puller, ref)) for puller in pullers.values()]
    async with asyncio.timeout(PULLED_S):
        while not fleet.swarms["c"].shelf._entries:  # noqa: ASYNC110 - its first chunk is announced to nobody
            await asyncio.sleep(0.01)
    dying.cancel()
    fleet.swarms["c"].close()
    pulled = await asyncio.gather(*pulling)
    assert all(is_right(each, weights(0)) for each in pulled)
    assert all(each.liars == () for each in pulled)
    await asyncio.gather(dying, return_exceptions=True)


async def test_who_is_not_on_the_list_gets_nothing_and_who_leaves_it_is_cut_off(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm, body = fleet.swarms["a"], wire.GetManifest(0)
    endpoint = f"tcp://127.0.0.1:{swarm.port}"

    def dial(keys: PeerKeys) -> WeightStream:
        return WeightStream(endpoint, PeerHandshake(keys.towards(swarm.public_key)), SILENCE_S, lambda: None)

    def ask(stream: WeightStream) -> bool:
        return stream.answer(stream.ask(body), lambda size: memoryview(bytearray(size)))

    member, stranger = PeerKeys.draw(), PeerKeys.draw()
    fleet.list("member", member.public, 0)
    with pytest.raises(OSError, match="closed"):
        await asyncio.to_thread(dial, stranger)
    with await asyncio.to_thread(dial, member) as stream:
        assert await asyncio.to_thread(ask, stream)
        fleet.list("leaves", PeerKeys.draw().public, 9)
        assert swarm.neighbours.choose(0.0, ()) == "leaves"
        fleet.lose("leaves")
        assert swarm.neighbours.choose(0.0, ()) is None
        fleet.lose("member")
        with pytest.raises(OSError, match=r"closed|[Rr]eset|[Bb]roken"):
            await asyncio.to_thread(ask, stream)
    with pytest.raises(OSError, match="closed"):
        await asyncio.to_thread(dial, member)


def ask(stream: WeightStream) -> bool:
    return stream.answer(stream.ask(wire.GetManifest(0)), lambda size: memoryview(bytearray(size)))


@pytest.mark.parametrize("makes_way_s", [0.0, 60.0], ids=["silent ones make way", "the newest is refused"])
async def test_it_serves_few_at_once(
    fleet: Fleet, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch, makes_way_s: float
) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.peers.server.MAKES_WAY_S", makes_way_s)
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm = fleet.swarms["a"]
    assert swarm.server is not None

    def dial() -> WeightStream:
        member = PeerKeys.draw()
        fleet.list(member.public.hex(), member.public, 0)
        handshake = PeerHandshake(member.towards(swarm.public_key))
        return WeightStream(f"tcp://127.0.0.1:{swarm.port}", handshake, PULLED_S, lambda: None)

    def take_all(stack: ExitStack) -> list[WeightStream]:
        taken = [stack.enter_context(dial()) for _ in range(UPLOADS)]
        assert all(ask(stream) for stream in taken)
        return taken

    def is_served(stream: WeightStream) -> bool:
        try:
            return bool(ask(stream))
        except ConnectionError:
            return False

    with ExitStack() as stack:
        taken = await asyncio.to_thread(take_all, stack)
        newest = stack.enter_context(await asyncio.to_thread(dial))
        assert await asyncio.to_thread(is_served, newest) is not bool(makes_way_s)
        # Which of them was silent for longest is for their threads to say, each once what it sent has left it.
        served = [await asyncio.to_thread(is_served, stream) for stream in taken]
        assert served.count(False) == (0 if makes_way_s else 1)
        assert len(swarm.server._uploads) <= UPLOADS


def busy(seconds: float) -> Content:
    """What a core has to work on for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return content(b"x")


async def test_who_asks_for_what_takes_long_to_make_gets_half_a_core(fleet: Fleet) -> None:
    """Bytes alone were bounded: deltas to be undone for each chunk, or questions by the thousand, were not."""
    giver, taker = fleet.server("giver", lambda _: busy(0.02)), PeerKeys.draw()
    handshake = PeerHandshake(taker.towards(giver._keys.public))
    with await asyncio.to_thread(
        WeightStream, f"tcp://127.0.0.1:{giver.port}", handshake, PULLED_S, lambda: None
    ) as stream:
        begun = time.monotonic()
        for _ in range(20):
            assert await asyncio.to_thread(ask, stream)
        assert time.monotonic() - begun > 0.9 * 19 * 0.02 / UPLOAD_CORES


async def test_one_member_takes_no_place_of_another(fleet: Fleet, publisher: WeightPublisher) -> None:
    """A few connections that asked for something now and then kept all others out for as long as they liked."""
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm, greedy, modest = fleet.swarms["a"], PeerKeys.draw(), PeerKeys.draw()
    for name, keys in (("greedy", greedy), ("modest", modest)):
        fleet.list(name, keys.public, 0)

    def dial(keys: PeerKeys) -> WeightStream:
        handshake = PeerHandshake(keys.towards(swarm.public_key))
        return WeightStream(f"tcp://127.0.0.1:{swarm.port}", handshake, PULLED_S, lambda: None)

    def take_all(stack: ExitStack) -> list[WeightStream]:
        taken = [stack.enter_context(dial(greedy)) for _ in range(UPLOADS)]
        assert all(ask(stream) for stream in taken)
        return taken

    with ExitStack() as stack:
        newest = (await asyncio.to_thread(take_all, stack))[-1]
        assert await asyncio.to_thread(ask, stack.enter_context(await asyncio.to_thread(dial, modest)))
        assert await asyncio.to_thread(ask, newest)


async def test_strangers_take_no_place_of_a_members(fleet: Fleet, publisher: WeightPublisher) -> None:
    """Some that dialled again and again, without a key, kept members out for as long as they liked."""
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm, member = fleet.swarms["a"], PeerKeys.draw()
    assert swarm.server is not None
    fleet.list("member", member.public, 0)
    with ExitStack() as stack:
        oldest = stack.enter_context(socket.create_connection(("127.0.0.1", swarm.port), PULLED_S))
        for _ in range(HANDSHAKES + UPLOADS):
            stack.enter_context(socket.create_connection(("127.0.0.1", swarm.port), PULLED_S))
        handshake = PeerHandshake(member.towards(swarm.public_key))

        def ask() -> bool:
            with WeightStream(f"tcp://127.0.0.1:{swarm.port}", handshake, PULLED_S, lambda: None) as stream:
                return stream.answer(stream.ask(wire.GetManifest(0)), lambda size: memoryview(bytearray(size)))

        assert await asyncio.to_thread(ask)
        assert await asyncio.to_thread(oldest.recv, 1) == b""
        assert len(swarm.server._dialled) <= HANDSHAKES


async def test_where_no_thread_is_left_for_one_the_next_is_served(
    fleet: Fleet, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that lets agents in had ended."""
    await pull(fleet.agent("a"), publisher.publish(0, weights(0).items(), FILES))
    swarm, member = fleet.swarms["a"], PeerKeys.draw()
    fleet.list("member", member.public, 0)
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        # Of the server's alone: the loop of this test starts some as well.
        if threading.current_thread() is threading.main_thread():
            return start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with socket.create_connection(("127.0.0.1", swarm.port), PULLED_S) as refused:
        assert await asyncio.to_thread(refused.recv, 1) == b""
    handshake = PeerHandshake(member.towards(swarm.public_key))

    def ask() -> bool:
        with WeightStream(f"tcp://127.0.0.1:{swarm.port}", handshake, PULLED_S, lambda: None) as stream:
            return stream.answer(stream.ask(wire.GetManifest(0)), lambda size: memoryview(bytearray(size)))

    assert await asyncio.to_thread(ask)


async def test_an_agent_that_nobody_can_dial_serves_those_that_it_dials(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    ref = publisher.publish(0, weights(0).items(), FILES)
    assert is_right(await pull(fleet.hidden("hidden"), ref), weights(0))
    joiner = fleet.agent("joiner")
    await fleet.offered("joiner", by="hidden")
    publisher.close()
    pulled = await pull(joiner, ref)
    assert is_right(pulled, weights(0))
    assert pulled.bytes_from_peers == pulled.bytes_pulled
    # What was used up is offered again, and bytes went through the bounds of any upload.
    await fleet.offered("joiner", by="hidden")
    assert fleet.swarms["hidden"].server.sent >= pulled.bytes_pulled


async def test_agents_that_nobody_can_dial_have_what_is_theirs_from_each_other_by_one_that_can(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    ref, number = publisher.publish(0, weights(0).items(), FILES), 5
    pullers = [fleet.agent("between"), *(fleet.hidden(f"h{each}") for each in range(number))]
    await asyncio.gather(*(fleet.offered("between", by=f"h{each}") for each in range(number)))
    pulled = await asyncio.gather(*(pull(puller, ref) for puller in pullers))
    assert all(is_right(each, weights(0)) for each in pulled)
    assert sent_by_publisher(pulled) <= 2 * pulled[0].staged.manifest.total_bytes


async def test_one_that_listens_in_vain_offers_and_one_that_was_dialled_does_not(
    fleet: Fleet, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.peers.offers.UNDIALLED_S", 0.1)
    ref = publisher.publish(0, weights(0).items(), FILES)
    behind = fleet.agent("behind")
    fleet.list("behind", fleet.swarms["behind"].public_key, 9)  # another address than where it listens
    await pull(behind, ref)
    joiner = fleet.agent("joiner")
    fleet.swarms["joiner"].neighbours.failed("behind", time.monotonic())
    await fleet.offered("joiner", by="behind")
    publisher.close()
    pulled = await pull(joiner, ref)
    assert pulled.bytes_from_peers == pulled.bytes_pulled
    assert fleet.swarms["joiner"].server.was_dialled, "by the offer"
    late = time.monotonic() + LONGEST_PAUSE_S
    assert [fleet.swarms[name]._offers._choose(late) for name in ("joiner", "behind")] == [None, "joiner"]


async def test_strangers_take_no_place_of_what_is_offered(
    fleet: Fleet, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.peers.offers.UNDIALLED_S", 0.1)
    ref = publisher.publish(0, weights(0).items(), FILES)
    behind = fleet.agent("behind")
    fleet.list("behind", fleet.swarms["behind"].public_key, 9)
    await pull(behind, ref)
    fleet.agent("joiner")
    await fleet.offered("joiner", by="behind")
    server = fleet.swarms["behind"].server
    with ExitStack() as strangers:
        for _ in range(HANDSHAKES + 4):
            strangers.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        async with asyncio.timeout(PULLED_S):
            while len(server._dialled) <= HANDSHAKES:  # noqa: ASYNC110 - a thread takes them in
                await asyncio.sleep(0.01)
        assert [one.is_own for one in server._dialled if one.is_own] == [True]


def test_one_that_listens_waits_to_be_dialled_before_it_offers(fleet: Fleet) -> None:
    fleet.agent("e")
    fleet.list("other", PeerKeys.draw().public, 9)
    offers, now = fleet.swarms["e"]._offers, time.monotonic()
    offers.close()
    assert [offers._choose(now + seconds) for seconds in (0.0, UNDIALLED_S - 1, UNDIALLED_S + 1)] == [
        None,
        None,
        "other",
    ]


async def test_a_false_chunk_on_an_offered_connection_is_refused_and_counted(
    fleet: Fleet, publisher: WeightPublisher
) -> None:
    ref, chunks, given = publisher.publish(0, weights(0).items(), FILES), held(publisher), 0

    def find(request: wire.FromPeer) -> Content | None:
        nonlocal given
        if not isinstance(request, wire.GetChunk):
            return claims_all(request)
        given += 1
        return content(turned(chunks[request.hash]))

    puller = fleet.agent("e")
    fleet.hidden("liar", find)
    await fleet.offered("e", by="liar")
    pulled = await pull(puller, ref)
    assert is_right(pulled, weights(0))
    assert (pulled.liars, pulled.bytes_from_peers) == (("liar",), 0)
    asked, offers = given, fleet.swarms["e"]._offered["liar"]
    async with asyncio.timeout(PULLED_S):
        while not fleet.swarms["liar"]._listening._known["e"].failures:  # noqa: ASYNC110 - threads of theirs
            await asyncio.sleep(0.01)
    assert fleet.swarms["e"]._offered["liar"] is offers, "none is taken of it any more"
    again = await pull(puller, publisher.publish(1, weights(1).items(), FILES), pulled)
    assert is_right(again, weights(1))
    assert given == asked


@pytest.mark.parametrize("leaver", ["hidden", "e"], ids=["who offers", "who asks"])
async def test_who_leaves_the_list_loses_what_was_offered(
    fleet: Fleet, publisher: WeightPublisher, leaver: str
) -> None:
    ref = publisher.publish(0, weights(0).items(), FILES)
    await pull(fleet.hidden("hidden"), ref)
    fleet.agent("e")
    await fleet.offered("e", by="hidden")
    with await asyncio.to_thread(fleet.swarms["e"].dial, "hidden", lambda: None) as stream:
        assert await asyncio.to_thread(ask, stream)
        fleet.lose(leaver)
        with pytest.raises(OSError, match=r"closed|[Rr]eset|[Bb]roken"):
            await asyncio.to_thread(ask, stream)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(fleet.swarms["e"].dial, "hidden", lambda: None)


async def test_one_that_waits_unused_ends_with_its_member(fleet: Fleet) -> None:
    fleet.hidden("hidden")
    fleet.agent("e")
    await fleet.offered("e", by="hidden")
    waiting = fleet.swarms["e"]._offered["hidden"].socket
    fleet.lose("hidden")
    assert waiting.fileno() < 0
    assert not fleet.swarms["e"]._offered


async def test_offers_of_few_are_kept(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrl_rollout.weights.peers.swarm.OFFERS", 1)
    fleet.agent("e")
    fleet.hidden("one")
    await fleet.offered("e", by="one")
    fleet.hidden("other")
    async with asyncio.timeout(PULLED_S):
        while not fleet.swarms["other"]._listening._known["e"].failures:  # noqa: ASYNC110 - threads of theirs
            await asyncio.sleep(0.01)
    assert list(fleet.swarms["e"]._offered) == ["one"]


@pytest.mark.parametrize("others", [1, 3])
async def test_what_is_too_little_for_so_few_comes_from_the_publisher_alone(
    fleet: Fleet, publisher: WeightPublisher, others: int
) -> None:
    ref = publisher.publish(0, weights(0).items(), FILES)
    size = publisher._kept[0].manifest.total_bytes
    puller = fleet.agent("e", least_bytes=3 * size)
    asked = Counter[str]()
    for number in range(others):
        fleet.server(f"p{number}", lambda request: asked.update([type(request).__name__]))
    assert is_right(await pull(puller, ref), weights(0))
    assert bool(asked) is (others == 3)
