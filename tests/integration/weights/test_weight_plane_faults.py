"""The weight plane over real sockets, with publishers that die or lie and pullers that stall, die or are strangers."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from safetensors.torch import load_file

from polyrl.keys import AgentKeys, TrainerKeys, format_keys
from polyrl.weights import VersionManifest, WeightsRef, cut_chunks, encode_manifest, manifest_hash, tensor_entry
from polyrl.wire import ChunkReply, GetChunk, GetManifest, ManifestReply, decode_from_puller, decode_to_puller, encode
from polyrl_rollout.weights.puller import Puller, PullFailed
from polyrl_rollout.weights.staging import Staging
from polyrl_trainer.weights.publisher import WeightPublisher

CHUNK = 64 << 10
FUZZED_REQUESTS = 4_000 * int(os.environ.get("POLYRL_FUZZ", "1"))
PULLED_S = 20.0
"""300 kB beside a flood, on crowded cores."""
STALL_S = 60.0
"""A puller that asks for much and reads none of it sleeps so long."""
FILES = {"config.json": b'{"model_type": "tiny"}'}


@dataclass(frozen=True)
class Keys:
    agent: AgentKeys
    trainer: TrainerKeys
    trainer_file: Path


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    pairs = {role: tuple(part.decode() for part in zmq.curve_keypair()) for role in ("manager", "trainer", "agent")}
    trainer = TrainerKeys(*pairs["trainer"], pairs["manager"][0], pairs["agent"][0])
    agent = AgentKeys(*pairs["agent"], pairs["manager"][0], pairs["trainer"][0])
    file = tmp_path / "trainer.key"
    file.touch(mode=0o600)
    file.write_text(format_keys(trainer))
    return Keys(agent, trainer, trainer_file=file)


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging("run", "engine", tmp_path)
    yield staging
    staging.close()
    assert not list(tmp_path.glob("polyrl-*"))


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 517, generator=draw).to(torch.bfloat16),
        "norm": torch.randn(517, generator=draw),
        "scale": torch.tensor(3.5, dtype=torch.float16),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


@pytest.fixture
def publishers(keys: Keys) -> Iterator[Callable[..., WeightPublisher]]:
    made: list[WeightPublisher] = []

    def make(bind: str = "tcp://127.0.0.1:*", chunk_bytes: int = CHUNK, **limits: int) -> WeightPublisher:
        made.append(WeightPublisher(keys.trainer_file, bind, chunk_bytes=chunk_bytes, **limits))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def held(publisher: WeightPublisher) -> dict[bytes, bytes]:
    """Chunks by their hashes."""
    replies = {hash_: decode_to_puller(reply) for hash_, reply in publisher._chunks.items()}
    return {hash_: reply.data for hash_, reply in replies.items() if isinstance(reply, ChunkReply)}


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
    assert [folder.name for folder in staging.root.glob("v*")] == ["v000001"]


async def test_receivers_that_ask_for_anything_keep_no_other_waiting(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher], seed: int
) -> None:
    """Eight identities with the key: requests with bytes changed, cut or added, hashes and versions that are none."""
    dice, publisher, tensors = random.Random(seed), publishers(), weights(0)
    published = publisher.publish(0, tensors.items(), FILES)
    requests = [GetManifest(0), GetManifest(-(2**40)), *(GetChunk(0, hash_) for hash_ in (b"x" * 32, b"", b"y" * 4000))]
    with zmq.Context() as context:
        peers = [stranger(context, keys, publisher.endpoint) for _ in range(8)]
        for _ in range(FUZZED_REQUESTS):
            frame = bytearray(encode(dice.choice(requests)))
            for _ in range(dice.randrange(4)):
                frame[dice.randrange(len(frame))] = dice.randrange(256)
            parts = [bytes(frame[: dice.choice((None, 3))]) for _ in range(dice.choice((1, 1, 1, 2)))]
            dice.choice(peers).send_multipart(parts)
        async with asyncio.timeout(PULLED_S):
            pulled = await Puller(keys.agent, staging).pull(published, None)
        for peer in peers:
            peer.close(linger=0)
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["norm"], tensors["norm"])
    assert publisher.dropped_frames.count


def stranger(context: zmq.Context[zmq.Socket[bytes]], keys: Keys, endpoint: str) -> zmq.Socket[bytes]:
    """With the agents' key; it reads nothing."""
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = keys.agent.public_key.encode(), keys.agent.secret_key.encode()
    socket.curve_serverkey = keys.trainer.public_key.encode()
    socket.setsockopt(zmq.SNDTIMEO, 20_000)
    socket.connect(endpoint)
    return socket


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
    body, chunks = whole._manifests[0], held(whole)
    some = dict(list(chunks.items())[:2])
    with Liar(keys.trainer, body, some.get) as dies, pytest.raises(PullFailed, match="gave nothing"):
        await Puller(keys.agent, staging, chunk_s=0.1, progress_s=3.0).pull(dies.announce(0), None)
    pulled = await Puller(keys.agent, staging).pull(published, None)
    assert pulled.bytes_pulled == sum(len(data) for hash_, data in chunks.items() if hash_ not in some)
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["embed"], tensors["embed"])


async def test_lost_answers_are_asked_for_again(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    whole = publishers()
    whole.publish(0, weights(3).items(), FILES)
    chunks, seen = held(whole), set()

    def second_time(hash_: bytes) -> bytes | None:
        known = hash_ in seen
        seen.add(hash_)
        return chunks[hash_] if known else None

    with Liar(keys.trainer, whole._manifests[0], second_time) as deaf:
        pulled = await Puller(keys.agent, staging, chunk_s=0.1).pull(deaf.announce(0), None)
    assert pulled.bytes_pulled == sum(map(len, chunks.values()))


async def test_false_chunks_are_never_served(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    whole = publishers()
    whole.publish(0, weights(4).items(), FILES)
    false = {hash_: bytes([data[0] ^ 1]) + data[1:] for hash_, data in held(whole).items()}
    with Liar(keys.trainer, whole._manifests[0], false.get) as liar, pytest.raises(PullFailed, match="not have their"):
        await Puller(keys.agent, staging, chunk_s=0.2).pull(liar.announce(0), None)
    assert not list(staging.root.glob("v*"))


async def test_a_false_tensor_checksum_and_a_false_manifest_are_never_served(keys: Keys, staging: Staging) -> None:
    entry = tensor_entry("t", "U8", (4,), 0, b"true")
    cut = list(cut_chunks([b"liar"]))
    manifest = VersionManifest(0, None, kind="full", tensors=(entry,), chunks=(cut[0][0],), files=())
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
    assert not list(staging.root.glob("v*"))


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
        await Puller(stranger, staging, chunk_s=0.1, progress_s=0.5).pull(published, None)


STALLING_PULLER = """
import os, sys, time, zmq
from pathlib import Path
from polyrl.keys import AgentKeys, read_keys
from polyrl.wire import GetManifest, GetChunk, encode
keys = read_keys(AgentKeys, Path(sys.argv[1]))
socket = zmq.Context().socket(zmq.DEALER)
socket.curve_publickey, socket.curve_secretkey = keys.public_key.encode(), keys.secret_key.encode()
socket.curve_serverkey = keys.trainer_public_key.encode()
socket.rcvhwm = 1
socket.connect(sys.argv[2])
socket.send(encode(GetManifest(0)))
socket.recv()
for _ in range(500):
    socket.send(encode(GetChunk(0, bytes.fromhex(sys.argv[3]))))
print("stalls", flush=True)
time.sleep(float(sys.argv[4]))
"""


async def test_a_puller_that_stalls_and_dies_costs_the_trainer_and_other_pullers_nothing(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher], tmp_path: Path
) -> None:
    publisher = publishers()
    published = publisher.publish(0, weights(0).items(), FILES)
    key_file = tmp_path / "agent.key"
    key_file.touch(mode=0o600)
    key_file.write_text(format_keys(keys.agent))
    argv = (str(key_file), published.endpoint, next(iter(publisher._chunks)).hex(), str(STALL_S))
    stalling = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STALLING_PULLER, *argv, stdout=subprocess.PIPE
    )
    assert stalling.stdout is not None
    assert await stalling.stdout.readline() == b"stalls\n"
    begun = time.monotonic()
    second = publisher.publish(1, weights(1).items(), FILES)
    took = time.monotonic() - begun
    pulled = await Puller(keys.agent, staging).pull(second, None)
    assert pulled.bytes_pulled == sum(tensor.nbytes for tensor in weights(1).values())
    stalling.kill()
    await stalling.wait()
    begun = time.monotonic()
    third = publisher.publish(2, weights(2).items(), FILES)
    took = max(took, time.monotonic() - begun)
    assert (await Puller(keys.agent, staging).pull(third, pulled.staged)).staged.version == 2
    # Publishing is a copy and a hash of 310 kB: had it waited for the puller, it had waited for its minute of sleep.
    assert took < STALL_S / 2


READERS_OF_NOTHING = """
import sys, zmq
from pathlib import Path
from polyrl.keys import AgentKeys, read_keys
from polyrl.wire import GetChunk, encode
keys, context, sockets = read_keys(AgentKeys, Path(sys.argv[1])), zmq.Context(), []
for _ in range(int(sys.argv[3])):
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = keys.public_key.encode(), keys.secret_key.encode()
    socket.curve_serverkey, socket.rcvhwm, socket.linger = keys.trainer_public_key.encode(), 1, 0
    socket.connect(sys.argv[2])
    for chunk in sys.argv[4:]:
        socket.send(encode(GetChunk(0, bytes.fromhex(chunk))))
    sockets.append(socket)
sys.stdin.read()
"""


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
            sys.executable, "-c", READERS_OF_NOTHING, *argv, stdin=subprocess.PIPE
        )
        try:
            yield
        finally:
            process.kill()
            await process.wait()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_readers_of_nothing_hold_a_frame_each_and_keep_nobody_out(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    frame, common, number = 4 << 20, 16 << 20, 20
    publisher = publishers(chunk_bytes=frame, max_bytes=common)
    big = {"a": torch.arange(8 * frame // 4, dtype=torch.float32)}
    published = publisher.publish(0, big.items(), FILES)
    before = resident_bytes()
    async with readers_of_nothing(keys, published.endpoint, number, publisher._chunks):
        # Together they ask for 640 MiB. What they leave lies in the system's buffers, and of each one frame in ours.
        await until(lambda: len(publisher._sending._sent) == number)
        grown = resident_bytes() - before
        pulled = await Puller(keys.agent, staging).pull(published, None)
        assert publisher._sending.num_bytes <= common + number * frame
    assert torch.equal(load_file(pulled.staged.folder / "model.safetensors")["a"], big["a"])
    assert grown < common + number * frame
    await until(lambda: not publisher._connections)
    assert (await Puller(keys.agent, staging).pull(published, None)).staged.version == 0


async def test_connections_are_counted_and_those_beyond_are_not_let_in(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    publisher = publishers(max_connections=3)
    published = publisher.publish(0, weights(0).items(), FILES)
    async with readers_of_nothing(keys, published.endpoint, 3):
        await until(lambda: len(publisher._connections) == 3)
        with pytest.raises(PullFailed, match="gave nothing"):
            await Puller(keys.agent, staging, chunk_s=0.1, progress_s=0.5).pull(published, None)
    await until(lambda: not publisher._connections)
    assert (await Puller(keys.agent, staging).pull(published, None)).staged.version == 0


def resident_bytes() -> int:
    """Of this process, in which the publisher is."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


ENDLESS = """
import sys, zmq
from pathlib import Path
from polyrl.keys import AgentKeys, read_keys
keys, socket = read_keys(AgentKeys, Path(sys.argv[1])), zmq.Context().socket(zmq.DEALER)
socket.curve_publickey, socket.curve_secretkey = keys.public_key.encode(), keys.secret_key.encode()
socket.curve_serverkey, socket.linger = keys.trainer_public_key.encode(), 0
socket.connect(sys.argv[2])
socket.send_multipart([bytes(4000)] * 60_000, copy=False)
sys.stdin.read()
"""
"""A request of 240 MB; each of its parts is nearly as large as a request may be."""


async def test_a_request_without_an_end_is_cut_off_and_others_are_served(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher], tmp_path: Path, capsys: Any
) -> None:
    publisher, key_file = publishers(max_request_bytes=4 << 20), tmp_path / "agent.key"
    key_file.touch(mode=0o600)
    key_file.write_text(format_keys(keys.agent))
    published, before, highest, output = publisher.publish(0, weights(0).items(), FILES), resident_bytes(), 0, ""
    argv = (str(key_file), published.endpoint)
    endless = await asyncio.create_subprocess_exec(sys.executable, "-c", ENDLESS, *argv, stdin=subprocess.PIPE)
    async with asyncio.timeout(STALL_S):
        while "cut off: a receiver of weights" not in (output := output + capsys.readouterr().out):
            highest = max(highest, resident_bytes())
            await asyncio.sleep(0.005)
    assert (await Puller(keys.agent, staging).pull(published, None)).staged.version == 0
    endless.kill()
    await endless.wait()
    assert highest - before < 64 << 20, "what is allowed, and what comes between two checks"


async def test_malformed_requests_are_counted_and_dropped(
    keys: Keys, staging: Staging, publishers: Callable[..., WeightPublisher]
) -> None:
    publisher = publishers()
    published = publisher.publish(0, weights(0).items(), FILES)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_publickey = keys.agent.public_key.encode()
        socket.curve_secretkey = keys.agent.secret_key.encode()
        socket.curve_serverkey = keys.trainer.public_key.encode()
        socket.connect(published.endpoint)
        for frame in (b"", b"\xc1", b"\x01\x93", bytes(4000)):
            socket.send(frame)
        socket.send_multipart([b"two", b"parts"])
        socket.send(encode(GetManifest(0)))
        assert await asyncio.to_thread(socket.poll, 5000)
    assert publisher.dropped_frames.count == 5
    assert (await Puller(keys.agent, staging).pull(published, None)).staged.version == 0


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
    (left_behind,) = tmp_path.glob("polyrl-run-killed-*")
    first, second = Staging("run", "engine", tmp_path), Staging("run", "engine", tmp_path)
    assert not left_behind.exists()
    assert set(tmp_path.iterdir()) == {first.root, second.root}
    first.close()
    second.close()


class Liar:
    """A publisher with the trainer's key that answers chunks as it likes."""

    def __init__(self, keys: TrainerKeys, body: bytes, chunk: Callable[[bytes], bytes | None]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public_key.encode(), keys.secret_key.encode()
        self._socket.linger = 0
        self._socket.bind("tcp://127.0.0.1:*")
        self._body, self._chunk, self._public_key = body, chunk, keys.public_key
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def announce(self, version: int) -> WeightsRef:
        return WeightsRef(version, self.endpoint, public_key=self._public_key, manifest_hash=manifest_hash(self._body))

    def __enter__(self) -> Liar:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)
        self._socket.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(50):
                continue
            identity, frame = self._socket.recv_multipart()
            request = decode_from_puller(frame)
            if isinstance(request, GetManifest):
                self._socket.send_multipart([identity, encode(ManifestReply(request.version, self._body))])
            elif isinstance(request, GetChunk) and (data := self._chunk(request.hash)) is not None:
                self._socket.send_multipart([identity, encode(ChunkReply(request.hash, data))])
