"""The weight plane over real sockets, with publishers that die or lie and pullers that stall, die or are strangers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from safetensors.torch import load_file

from polyrl.errors import ProtocolError
from polyrl.keys import AgentKeys, TrainerKeys, format_keys
from polyrl.weights import VersionManifest, WeightsRef, cut_chunks, encode_manifest, manifest_hash, tensor_entry
from polyrl.wire import FromPuller, GetChunk, GetManifest, encode
from polyrl.wire.sealing import GREETING, PUBLIC_BYTES, Handshake, LastingKeys
from polyrl.wire.serving import ABOUT_REQUESTS, BUFFER_BYTES, MAX_ASKED, MAX_REQUEST_BYTES, Content
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staging
from polyrl_rollout.weights.transfer import PullFailed
from polyrl_trainer.weights.publisher import WeightPublisher
from polyrl_trainer.weights.server import WeightServer, dialled_endpoint
from tests.integration.weights.conftest import CHUNK, FILES, SEALED_ONLY, Keys, complete

FUZZED_REQUESTS = 4_000 * int(os.environ.get("POLYRL_FUZZ", "1"))
PULLED_S = 20.0
"""300 kB beside a flood, on crowded cores."""
STALL_S = 60.0
"""A puller that asks for much and reads none of it sleeps so long."""


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 517, generator=draw).to(torch.bfloat16),
        "norm": torch.randn(517, generator=draw),
        "scale": torch.tensor(3.5, dtype=torch.float16),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


def held(publisher: WeightPublisher) -> dict[bytes, bytes]:
    """Chunks by their hashes."""
    found = {}
    for version, kept in publisher._kept.items():
        for chunk in kept.manifest.chunks:
            content = publisher._find(GetChunk(version, chunk.hash))
            assert content is not None
            found[chunk.hash] = bytes(content.data)
    return found


def body_of(publisher: WeightPublisher, version: int) -> bytes:
    return publisher._kept[version].body


def receivers_of(keys: Keys) -> LastingKeys:
    return LastingKeys.of(keys.agent.secret_key, keys.agent.public_key, keys.trainer.public_key)


class Dialled:
    """A connection with the agents' key, whose frames the test seals itself; it reads nothing by itself."""

    def __init__(self, keys: Keys, endpoint: str) -> None:
        handshake = Handshake(receivers_of(keys))
        self.socket = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), 20)
        self.socket.sendall(GREETING + handshake.public)
        theirs = b""
        while len(theirs) < PUBLIC_BYTES:
            theirs += self.socket.recv(PUBLIC_BYTES - len(theirs))
        self.sealer, self.opener = handshake.finish(theirs, dialled=True)
        self.buffer = memoryview(bytearray(BUFFER_BYTES))

    def seal(self, content: bytes) -> bytes:
        return bytes(self.sealer.seal(content, ABOUT_REQUESTS, self.buffer))

    def frames(self, request: bytes) -> bytes:
        return self.seal(len(request).to_bytes(2, "big")) + self.seal(request)

    def is_closed(self) -> bool:
        """Once it answers no more; what it still has to say is read."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True


async def test_what_is_pulled_is_what_was_published_to_the_bit(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    publisher, tensors = publishers(), weights(0)
    published = publisher.publish(0, tensors.items(), FILES)
    pulled = await Puller(keys.agent, staging).pull(published, None)
    assert pulled.staged.receipt == published.receipt != b""
    assert pulled.bytes_pulled == sum(t.nbytes for t in tensors.values())
    loaded = load_file(pulled.staged.folder / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert (pulled.staged.folder / "config.json").read_bytes() == FILES["config.json"]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"vocab_size": 7, "max_position_embeddings": 99}, (7, 99)),
        ({}, (0, 0)),
        ({"vocab_size": "7", "max_position_embeddings": None}, (0, 0)),
    ],
)
def test_the_models_own_sizes_are_published(
    publishers: Callable[..., WeightPublisher], config: dict[str, Any], sizes: tuple[int, int]
) -> None:
    published = publishers().publish(0, weights(0).items(), {"config.json": json.dumps(config).encode()})
    assert (published.vocabulary, published.positions) == sizes


async def test_only_chunks_that_changed_are_pulled(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    publisher, tensors = publishers(), weights(1)
    puller = Puller(keys.agent, staging)
    first = await puller.pull(publisher.publish(0, tensors.items(), FILES), None)
    tensors["norm"] = tensors["norm"] + 1
    second = await puller.pull(publisher.publish(1, tensors.items(), FILES), first.staged)
    assert 0 < second.bytes_pulled <= CHUNK
    assert second.staged.receipt != first.staged.receipt
    assert torch.equal(load_file(second.staged.folder / "model.safetensors")["norm"], tensors["norm"])
    staging.keep_only(1)
    assert complete(staging) == [0, 1]


async def test_receivers_that_ask_for_anything_keep_no_other_waiting(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher], seed: int
) -> None:
    """With the key: requests with bytes changed, cut or added, before and after they were sealed, of hashes and
    versions that are none. Each connection ends at the first that cannot be read."""
    dice, publisher, tensors = random.Random(seed), publishers(), weights(0)
    published = publisher.publish(0, tensors.items(), FILES)
    requests = [GetManifest(0), GetManifest(-(2**40)), *(GetChunk(0, hash_) for hash_ in (b"x" * 32, b"", b"y" * 200))]
    peer = Dialled(keys, publisher.endpoint)
    for _ in range(FUZZED_REQUESTS):
        request = changed(encode(dice.choice(requests)), dice, dice.randrange(4))
        frames = changed(peer.frames(request[: dice.choice((None, 3))]), dice, dice.choice((0, 0, 1)))
        try:
            peer.socket.sendall(frames)
        except ConnectionError:
            peer.socket.close()
            peer = Dialled(keys, publisher.endpoint)
    async with asyncio.timeout(PULLED_S):
        pulled = await Puller(keys.agent, staging).pull(published, None)
    peer.socket.close()
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["norm"], tensors["norm"])
    assert publisher.server.refused.count


def changed(content: bytes, dice: random.Random, times: int) -> bytes:
    other = bytearray(content)
    for _ in range(times):
        other[dice.randrange(len(other))] = dice.randrange(256)
    return bytes(other)


async def test_a_version_that_is_no_longer_kept_fails_the_pull(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    publisher = publishers()
    old = publisher.publish(0, weights(0).items(), FILES)
    for version in (1, 2):
        publisher.publish(version, weights(version).items(), FILES)
    with pytest.raises(PullFailed, match="no longer kept"):
        await Puller(keys.agent, staging).pull(old, None)


async def test_a_publisher_that_comes_back_is_asked_only_for_what_is_missing(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    tensors = weights(2)
    whole = publishers()
    published = whole.publish(0, tensors.items(), FILES)
    body, chunks = body_of(whole, 0), held(whole)
    some = dict(list(chunks.items())[:2])

    def hang_up(hash_: bytes) -> bytes:
        if hash_ not in some:
            raise ProtocolError("hangs up")
        return some[hash_]

    with Liar(keys.trainer, body, hang_up) as dies, pytest.raises(PullFailed, match="gave nothing"):
        await Puller(keys.agent, staging, silence_s=0.1, progress_s=1.5).pull(dies.announce(0), None)
    pulled = await Puller(keys.agent, staging).pull(published, None)
    assert pulled.bytes_pulled == sum(len(data) for hash_, data in chunks.items() if hash_ not in some)
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["embed"], tensors["embed"])


async def test_lost_answers_are_asked_for_again(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    whole = publishers()
    whole.publish(0, weights(3).items(), FILES)
    chunks, seen = held(whole), set()

    def second_time(hash_: bytes) -> bytes:
        if hash_ not in seen:
            seen.add(hash_)
            raise ProtocolError("lost")
        return chunks[hash_]

    with Liar(keys.trainer, body_of(whole, 0), second_time) as deaf:
        pulled = await Puller(keys.agent, staging, silence_s=0.1).pull(deaf.announce(0), None)
    assert pulled.bytes_pulled == sum(map(len, chunks.values()))


async def test_false_chunks_are_never_served(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    whole = publishers()
    whole.publish(0, weights(4).items(), FILES)
    asked: list[bytes] = []

    def false(hash_: bytes) -> bytes:
        asked.append(hash_)
        data = held(whole)[hash_]
        return bytes([data[0] ^ 1]) + data[1:] if hash_ == min(held(whole)) else data

    with Liar(keys.trainer, body_of(whole, 0), false) as liar:
        with pytest.raises(PullFailed, match="fails its checksum"):
            await Puller(keys.agent, staging, silence_s=0.2).pull(liar.announce(0), None)
        assert not complete(staging)
        chunks = len(held(whole))
        assert len(asked) == chunks + 2, "only false ones are asked for again"
    staged = (await Puller(keys.agent, staging).pull(whole.publish(0, weights(4).items(), FILES), None)).staged
    assert torch.equal(load_file(staged.folder / "model.safetensors")["norm"], weights(4)["norm"])


@SEALED_ONLY
async def test_frames_changed_on_the_way_are_asked_for_again(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    """By somebody between the two, once on each of the first connections."""
    published = publishers().publish(0, weights(5).items(), FILES)
    async with between(published.endpoint, faults=6) as (endpoint, broken):
        ref = msgspec.structs.replace(published, endpoint=endpoint)
        pulled = await Puller(keys.agent, staging, silence_s=1.0).pull(ref, None)
    assert broken
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["embed"], weights(5)["embed"])


def flip_a_bit(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@dataclass(frozen=True)
class Fault:
    """What befalls a connection behind its FAULT_AT-th byte."""

    change: Callable[[bytes, int], bytes] = lambda data, at: data
    pause_s: float = 0.0
    """Before each kilobyte from there on; for ever is longer than a test."""
    hangs_up: bool = False


FAULT_AT = 100_000
SLOW, FROZEN = Fault(pause_s=1.0), Fault(pause_s=1e6)
CHANGED, BROKEN = Fault(change=flip_a_bit), Fault(hangs_up=True)


@asynccontextmanager
async def between(endpoint: str, faults: int, fault: Fault = CHANGED) -> AsyncIterator[tuple[str, list[int]]]:
    """A relay in which the first `faults` connections have their fault; which ones had it."""
    hit: list[int] = []
    port, connections, relays = int(endpoint.rpartition(":")[2]), iter(range(1 << 30)), set[asyncio.Task[Any]]()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, number: int) -> None:
        left, size = FAULT_AT, 1 << 16
        while data := await source.read(size):
            if number < faults and left < len(data):
                if left >= 0:
                    hit.append(number)
                    data = fault.change(data, left)
                if fault.hangs_up:
                    return
                size = 1000 if fault.pause_s else size
                await asyncio.sleep(fault.pause_s)
            left -= len(data)
            sink.write(data)
            await sink.drain()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, ends, ways = next(connections), [writer], set[asyncio.Task[None]]()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            ends.append(back)
            ways = {asyncio.create_task(copy(reader, back, faults)), asyncio.create_task(copy(there, writer, number))}
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Before anything is awaited: whoever is cancelled here again would leave them open.
            for end in ends:
                end.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.add(asyncio.create_task(relay(reader, writer)))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", hit
        for each in relays:
            each.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


@SEALED_ONLY
@pytest.mark.parametrize("fault", [SLOW, FROZEN, BROKEN], ids=["1 kB a second", "frozen", "hangs up"])
async def test_whatever_befalls_all_connections_the_next_pull_asks_only_for_the_rest(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher], fault: Fault
) -> None:
    """Each connection brings a chunk of 64 KiB, and of the next one a part."""
    tensors = weights(6)
    published = publishers().publish(0, tensors.items(), FILES)
    async with between(published.endpoint, faults=4, fault=fault) as (endpoint, hit):
        ref = msgspec.structs.replace(published, endpoint=endpoint)
        puller = Puller(keys.agent, staging, silence_s=2.5 if fault is SLOW else 0.5, progress_s=2.0)
        begun = time.monotonic()
        try:
            pulled = await puller.pull(ref, None)
        except PullFailed as error:
            assert "gave nothing" in str(error)  # noqa: PT017
            assert not complete(staging), "half a version is none"
            pulled = await Puller(keys.agent, staging).pull(published, None)
            assert pulled.bytes_pulled < sum(tensor.nbytes for tensor in tensors.values()), "what had come was kept"
        assert time.monotonic() - begun < PULLED_S
    assert hit
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["embed"], tensors["embed"])


async def test_a_false_tensor_checksum_and_a_false_manifest_are_never_served(keys: Keys, staging: Staging) -> None:
    entry = tensor_entry("t", "U8", (4,), 0, b"true")
    manifest = VersionManifest(0, None, kind="anchor", tensors=(entry,), chunks=cut_chunks(b"liar"), files=())
    body = encode_manifest(manifest)
    with Liar(keys.trainer, body, lambda hash_: b"liar") as liar:
        with pytest.raises(PullFailed, match="tensor t of version 0 fails its checksum"):
            await Puller(keys.agent, staging).pull(liar.announce(0), None)
        with pytest.raises(PullFailed, match="not the announced one"):
            await Puller(keys.agent, staging).pull(
                WeightsRef(0, liar.endpoint, public_key=keys.trainer.public_key, manifest_hash=b"another hash"), None
            )
        with pytest.raises(PullFailed, match="not the trainer's"):
            await Puller(keys.agent, staging).pull(
                WeightsRef(0, liar.endpoint, public_key="x" * 40, manifest_hash=manifest_hash(body)), None
            )
    assert not complete(staging)


async def test_a_stranger_gets_nothing(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    published = publishers().publish(0, weights(0).items(), FILES)
    public, secret = (part.decode() for part in zmq.curve_keypair())
    stranger = AgentKeys(
        public,
        secret,
        manager_public_key=keys.agent.manager_public_key,
        trainer_public_key=keys.agent.trainer_public_key,
    )
    with pytest.raises(PullFailed, match="gave nothing"):
        await Puller(stranger, staging, silence_s=0.1, progress_s=0.5).pull(published, None)


READERS_OF_NOTHING = """
import contextlib, select, sys
from pathlib import Path
from polyrl.keys import AgentKeys, read_keys
from polyrl.wire import GetChunk, GetManifest, encode
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl.wire.serving import ABOUT_REQUESTS, MAX_ASKED, BUFFER_BYTES
from polyrl_rollout.weights.stream import WeightStream
keys, streams = read_keys(AgentKeys, Path(sys.argv[1])), []
lasting = LastingKeys.of(keys.secret_key, keys.public_key, keys.trainer_public_key)
for _ in range(int(sys.argv[3])):
    streams.append(WeightStream(sys.argv[2], Handshake(lasting), 20.0, lambda: None))
    for chunk in sys.argv[4:]:
        streams[-1].ask(GetChunk(0, bytes.fromhex(chunk)))
print("stalls", flush=True)
body, buffer = encode(GetManifest(0)), memoryview(bytearray(BUFFER_BYTES))
more = [
    b"".join(
        bytes(stream._sealer.seal(part, ABOUT_REQUESTS, buffer))
        for _ in range(MAX_ASKED - len(sys.argv[4:]))
        for part in (len(body).to_bytes(2, "big"), body)
    )
    for stream in streams
]
for at in range(len(more[0])):
    if select.select([sys.stdin], [], [], 0.4)[0]:
        break
    for stream, request in zip(streams, more):
        with contextlib.suppress(OSError):
            stream._socket.sendall(request[at : at + 1])
sys.stdin.read()
"""
"""Each asks on, a byte at a time, as long as it lives."""


@asynccontextmanager
async def readers_of_nothing(
    keys: Keys, endpoint: str, number: int, chunks: Iterable[bytes] = ()
) -> AsyncIterator[None]:
    """Connections with the agents' key, of another process, that ask for these chunks; what comes stays where it is."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(format_keys(keys.agent))
        file.flush()
        argv = (file.name, endpoint, str(number), *(chunk.hex() for chunk in chunks))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READERS_OF_NOTHING, *argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"stalls\n"
            yield
        finally:
            process.kill()
            await process.wait()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_puller_that_stalls_and_dies_costs_the_trainer_and_other_pullers_nothing(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    publisher = publishers()
    published = publisher.publish(0, weights(0).items(), FILES)
    async with readers_of_nothing(keys, published.endpoint, 1, list(held(publisher))[:MAX_ASKED]):
        begun = time.monotonic()
        second = publisher.publish(1, weights(1).items(), FILES)
        took = time.monotonic() - begun
        pulled = await Puller(keys.agent, staging).pull(second, None)
        assert pulled.bytes_pulled == sum(tensor.nbytes for tensor in weights(1).values())
    begun = time.monotonic()
    third = publisher.publish(2, weights(2).items(), FILES)
    took = max(took, time.monotonic() - begun)
    assert (await Puller(keys.agent, staging).pull(third, pulled.staged)).staged.version == 2
    # Publishing is a copy and a hash of 310 kB: had it waited for the puller, it had waited for its minute of sleep.
    assert took < STALL_S / 2


async def test_readers_of_nothing_share_what_is_theirs_and_keep_nobody_out(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    chunk, common, number = 4 << 20, 16 << 20, 40
    publisher = publishers(chunk_bytes=chunk, max_bytes=common, stall_s=1.0)
    big = {"a": torch.arange(8 * chunk // 4, dtype=torch.float32)}
    published = publisher.publish(0, big.items(), FILES)
    before = resident_bytes()
    # Else a whole frame finds room in the system's, and none of ours is ever held.
    publisher.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    async with readers_of_nothing(keys, published.endpoint, number, list(held(publisher))[:4]):
        # Together they ask for 640 MiB. What they leave lies in the system's buffers, and of some a frame in ours.
        await until(lambda: publisher.server.stalled.count > 0)
        buffers = [peer.buffer for thread in publisher.server._threads for peer in tuple(thread._peers)]
        assert 0 < len([buffer for buffer in buffers if buffer is not None]) <= common // BUFFER_BYTES
        async with asyncio.timeout(PULLED_S):
            pulled = await Puller(keys.agent, staging).pull(published, None)
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["a"], big["a"])
    assert resident_bytes() - before < common + 2 * big["a"].nbytes, "buffers, and the staged file as it is mapped here"
    await until(lambda: not publisher.server.num_connections)


async def test_connections_that_ask_for_nothing_whole_make_room(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    """They have shown an agent's key, and each sends a byte of its next request now and then."""
    most = 8
    publisher = publishers(max_connections=most)
    published = publisher.publish(0, weights(0).items(), FILES)
    chunk = next(iter(held(publisher)))
    async with readers_of_nothing(keys, published.endpoint, most, [chunk]):
        await until(lambda: publisher.server.num_connections == most)
        async with asyncio.timeout(PULLED_S):
            assert (await Puller(keys.agent, staging).pull(published, None)).staged.version == 0
        assert publisher.server.num_connections <= most
    await until(lambda: not publisher.server.num_connections)


def resident_bytes() -> int:
    """Of this process, in which the publisher is."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_malformed_requests_end_their_connection_and_are_counted(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    publisher = publishers()
    published = publisher.publish(0, weights(0).items(), FILES)

    malformed: list[Callable[[Dialled], bytes]] = [
        lambda peer: peer.frames(b"\xc1"),
        lambda peer: peer.frames(b"\x01\x93"),
        lambda peer: peer.frames(bytes(MAX_REQUEST_BYTES)),
        lambda peer: peer.seal((MAX_REQUEST_BYTES + 1).to_bytes(2, "big")),
        lambda peer: peer.seal((0).to_bytes(2, "big")),
        lambda peer: b"".join(peer.frames(encode(GetManifest(0))) for _ in range(MAX_ASKED + 8)),
        lambda peer: bytes(200),
        lambda peer: 2 * peer.frames(encode(GetManifest(0)))[:40],
    ]
    for number, frames in enumerate(malformed, start=1):
        peer = Dialled(keys, publisher.endpoint)
        peer.socket.sendall(frames(peer))
        assert await asyncio.to_thread(peer.is_closed)
        peer.socket.close()
        assert publisher.server.refused.count == number
    with socket.create_connection(("127.0.0.1", publisher.server.port), 20) as stranger:
        stranger.sendall(b"GET / HTTP/1.1".ljust(PUBLIC_BYTES + len(GREETING)))
        assert not await asyncio.to_thread(stranger.recv, 100)
    assert (await Puller(keys.agent, staging).pull(published, None)).staged.version == 0


async def test_a_version_of_another_start_of_the_run_is_refused(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    """A trainer that is left over, with the run's keys and a manager that announces it, has other weights under a
    number that this start gives out again."""
    earlier, now = publishers(run_epoch=1), publishers(run_epoch=2, deltas=True)
    puller = Puller(keys.agent, staging, run_epoch=2)
    served = (await puller.pull(now.publish(0, weights(0).items(), FILES), None)).staged
    left_over = earlier.publish(1, weights(1).items(), FILES)
    with pytest.raises(PullFailed, match="version 1 was made in start 1 of the run, and this is start 2"):
        await puller.pull(left_over, served)
    assert complete(staging) == [0]
    newer = {**weights(0), "norm": weights(2)["norm"]}
    pulled = await puller.pull(now.publish(1, newer.items(), FILES), served)
    assert pulled.staged.manifest.kind == "delta"
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["norm"], newer["norm"])


async def test_a_version_is_published_once(publishers: Callable[..., WeightPublisher]) -> None:
    publisher = publishers()
    first = publisher.publish(0, weights(0).items(), FILES)
    again = publisher.publish(0, weights(0).items(), FILES)
    assert again.manifest_hash == first.manifest_hash
    with pytest.raises(Exception, match="published before with other content"):
        publisher.publish(0, weights(1).items(), FILES)


def test_folders_of_killed_engines_are_swept_and_live_ones_kept(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal; from pathlib import Path; from polyrl_rollout.weights.staging import Staging\n"
        "Staging('run', 'killed', Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    (left_behind,) = tmp_path.glob("polyrl-run-killed")
    first, second = Staging("run", "a", tmp_path), Staging("run", "b", tmp_path)
    assert not left_behind.exists()
    assert set(tmp_path.iterdir()) == {first.root, second.root}
    first.close()
    second.close()


class Liar:
    """A publisher with the trainer's key that answers chunks as it likes; it hangs up where that raises."""

    def __init__(self, keys: TrainerKeys, body: bytes, chunk: Callable[[bytes], bytes | None]) -> None:
        self._body, self._chunk, self._public_key = body, chunk, keys.public_key
        self.bodies: dict[int, bytes] = {}
        """Of other versions."""
        lasting = LastingKeys.of(keys.secret_key, keys.public_key, keys.agent_public_key)
        self._server = WeightServer("tcp://127.0.0.1:*", lambda: Handshake(lasting), self._find)
        self.endpoint = dialled_endpoint(self._server, "")

    def announce(self, version: int) -> WeightsRef:
        return WeightsRef(version, self.endpoint, public_key=self._public_key, manifest_hash=manifest_hash(self._body))

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _find(self, request: FromPuller) -> Content | None:
        body = self.bodies.get(request.version, self._body)
        data = body if isinstance(request, GetManifest) else self._chunk(request.hash)
        return None if data is None else Content(memoryview(data), nullcontext)
