"""Agents of one run that give each other chunks over real sockets, and what tests ask of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file

from polyrl import wire
from polyrl.weights import WeightsRef
from polyrl.wire.inventory import Inventory, encode_inventory
from polyrl.wire.roster import Roster
from polyrl.wire.sealing import PeerKeys
from polyrl.wire.serving import Content
from polyrl_rollout.weights.peers.server import PeerServer
from polyrl_rollout.weights.peers.swarm import Swarm
from polyrl_rollout.weights.puller import Pulled, Puller
from polyrl_rollout.weights.staging import Staging
from polyrl_rollout.weights.stream import WeightStream

if TYPE_CHECKING:
    from tests.integration.weights.conftest import Keys

CHUNKS = 24
PULLED_S = 30.0
"""1.5 MB, on crowded cores."""
SILENCE_S = 1.0


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


def is_right(pulled: Pulled, tensors: dict[str, torch.Tensor]) -> bool:
    loaded = load_file(pulled.staged.folder / "model.safetensors")
    return all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


async def pull(puller: Puller, ref: WeightsRef, served: Pulled | None = None) -> Pulled:
    async with asyncio.timeout(PULLED_S):
        return await puller.pull(ref, served and served.staged)


def sent_by_publisher(pulled: Iterable[Pulled]) -> int:
    return sum(each.bytes_pulled - each.bytes_from_peers for each in pulled)


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


def ask(stream: WeightStream) -> bool:
    return stream.answer(stream.ask(wire.GetManifest(0)), lambda size: memoryview(bytearray(size)))


def moved(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A hundredth of all words by one."""
    draw = torch.Generator().manual_seed(seed)
    words = tensors["a"].view(torch.int16)
    return {"a": (words + (torch.rand(words.shape, generator=draw) < 0.01).to(torch.int16)).view(torch.bfloat16)}
