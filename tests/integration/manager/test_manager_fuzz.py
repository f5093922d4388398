"""100,000 malformed frames from a peer with the key, 100,000 from strangers: memory stays flat, work goes on whole.

POLYRL_FUZZ=10 makes it a million of each.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
import zmq
import zmq.asyncio

from polyrl import wire
from polyrl.control import Endpoints
from polyrl.keys import AgentKeys, OperatorKeys, TrainerKeys, read_keys
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.weights import WeightsRef
from polyrl.wire.engine_identity import engine_keys, identity_of
from polyrl_rollout.testing.fake_agent import FakeAgent, made_tokens
from polyrl_trainer.client import RolloutClient

EPOCH = 3
TIMES = int(os.environ.get("POLYRL_FUZZ", "1"))
"""How many times the number of frames that every run of the tests tries."""
DEADLINE_S = 60.0 * TIMES
GROWTH_BYTES = 20 << 20
FRAMES = 100_000 * TIMES
STRANGERS = 2_000 * TIMES
"""Connections of strangers; each brings FRAMES / STRANGERS frames."""
WRONG_KEYS = 100
"""Handshakes with a proper key that is on no list."""

SEEDS = [
    wire.Hello(
        EPOCH,
        "fuzzer",
        pool=Pool.SPOT,
        max_running=4,
        kv_tokens=4096,
        max_context=512,
        weight_version=-1,
        held=(wire.HeldAssignment(7, "4.1", attempt=2, length=30),),
    ),
    wire.Deltas(5, 0, rows=np.zeros(2, dtype=wire.ROW_DTYPE).tobytes(), ids=b"", logprobs=b""),
    wire.Heartbeat(3, 1, kv_free_tokens=1000),
    wire.WeightsLoaded(9, 0.5, load_seconds=0.25, bytes_pulled=1 << 20),
    wire.HandBack(7, "draining", detail="soon"),
    wire.Leaving(20.0, "SIGTERM"),
    wire.Score(2, "0.1", turn=0, reward=1.0, metrics={"exact": 1.0}),
    wire.Submit(
        1,
        (
            Group(
                4,
                2,
                purpose=Purpose.TRAIN,
                prompt_ids=b"1234",
                n=8,
                sampling=SamplingParams(64),
                min_version=9,
                max_version=9,
            ),
        ),
    ),
    wire.BatchRequest(5, 2, purpose=Purpose.TRAIN, min_samples=16, max_samples=32, max_tokens=4096, deadline_s=60.0),
]


def mutated(dice: random.Random) -> bytes:
    """A frame that was right before some of its bytes were changed, cut or added."""
    frame = bytearray(wire.encode(dice.choice(SEEDS)))
    for _ in range(dice.randint(1, 6)):
        frame[dice.randrange(len(frame))] = dice.randrange(256)
    if dice.random() < 0.3:
        del frame[dice.randrange(len(frame)) :]
    return bytes(frame) + dice.randbytes(dice.choice((0, 0, 3, 300)))


def flood(endpoint: str, own: AgentKeys | TrainerKeys, count: int, seed: int, received: threading.Event) -> None:
    """Sends `count` mutated frames from a peer that has the key; reads nothing, and stays until all were received."""
    dice = random.Random(seed)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.curve_publickey, peer.curve_secretkey = own.public_key.encode(), own.secret_key.encode()
        peer.curve_serverkey = own.manager_public_key.encode()
        peer.setsockopt(zmq.IDENTITY, identity_of("fuzzer", own) if isinstance(own, AgentKeys) else b"fuzzer")
        peer.setsockopt(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(endpoint)
        for _ in range(count):
            peer.send(mutated(dice))
        assert received.wait(DEADLINE_S)


def storm(endpoint: str, connections: int, frames: int, seed: int) -> None:
    """Strangers: TCP connections that speak ZMTP up to some point, then anything."""
    dice = random.Random(seed)
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    mechanisms = (b"CURVE", b"NULL", b"PLAIN")
    for _ in range(connections):
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + dice.choice(mechanisms).ljust(20, b"\0") + bytes(32)
        junk = [bytes((dice.choice((0, 1, 2, 4, 6)), 200)) + dice.randbytes(200) for _ in range(frames)]
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as peer:
            try:
                peer.sendall(dice.choice((greeting, dice.randbytes(64))) + b"".join(junk))
            except OSError:
                continue  # being shut out in the middle of a word is a fair answer


def wrong_keys(endpoint: str, server_key: str, count: int, received: threading.Event) -> None:
    """Strangers with a CURVE pair of their own, who stay until all were refused."""
    with zmq.Context() as context:
        peers = []
        for _ in range(count):
            peer = context.socket(zmq.DEALER)
            peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
            peer.curve_serverkey = server_key.encode()
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(endpoint)
            peer.send(wire.encode(SEEDS[0]))
            peers.append(peer)
        assert received.wait(DEADLINE_S)
        assert not any(peer.poll(10) for peer in peers)
        for peer in peers:
            peer.close()


async def judge(client: RolloutClient) -> None:
    async for turn in client.turns():
        await client.score(turn.response.sample, turn.response.turn, 1.0)


async def work(client: RolloutClient, rounds: range) -> None:
    """One round: four groups there and back, every token known."""
    for number in rounds:
        groups = [
            Group(
                number * 4 + i,
                number,
                purpose=Purpose.TRAIN,
                prompt_ids=b"abcd",
                n=4,
                sampling=SamplingParams(100),
                min_version=0,
                max_version=0,
            )
            for i in range(4)
        ]
        await client.submit(groups)
        batch = await client.next(
            number, purpose=Purpose.TRAIN, min_samples=16, max_samples=16, max_tokens=10**6, deadline_s=DEADLINE_S
        )
        assert len(batch.samples) == 16
        for scored in batch.samples:
            made = made_tokens(scored.response.sample, 0, 100)
            assert np.array_equal(wire.unpack_ids(scored.response.ids), made)
        await client.acknowledge(batch.number)


async def metrics(ends: Endpoints, keys: Path) -> str:
    headers = {"Authorization": f"Bearer {read_keys(OperatorKeys, keys / 'operator.key').http_token}"}
    async with aiohttp.ClientSession(ends.http, headers=headers) as http, http.get("/metrics") as response:
        return await response.text()


def count_of(name: str, text: str) -> float:
    return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])


async def all_received(ends: Endpoints, keys: Path) -> None:
    """Returns when every frame of the floods has arrived, and every wrong key was refused."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            text = await metrics(ends, keys)
            frames = [
                count_of(f'polyrl_frames_total{{direction="in",socket="{n}"}}', text) for n in ("agents", "trainer")
            ]
            refused = count_of('polyrl_handshakes_refused_total{socket="agents"}', text)
            if frames[0] > FRAMES * 4 // 5 and frames[1] > FRAMES // 5 and refused >= WRONG_KEYS:
                return
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_malformed_and_unauthenticated_frames_leave_memory_flat_and_the_work_whole(
    running: tuple[Path, Endpoints], seed: int
) -> None:
    folder, ends = running
    agent, trainer = (
        engine_keys(folder / "keys", "fuzzer"),
        read_keys(TrainerKeys, folder / "keys/trainer.key"),
    )
    context = zmq.asyncio.Context()
    greetings = [
        wire.Hello(
            EPOCH, f"engine-{i}", pool=Pool.SPOT, max_running=16, kv_tokens=10**5, max_context=10**4, weight_version=-1
        )
        for i in range(2)
    ]
    keys = [engine_keys(folder / "keys", hello.engine) for hello in greetings]
    fakes = [FakeAgent(context, ends.agents, own, hello) for own, hello in zip(keys, greetings, strict=True)]
    agents = [asyncio.create_task(fake.run()) for fake in fakes]
    memory = psutil.Process(ends.pid).memory_info
    async with RolloutClient.connect(ends.trainer, folder / "keys/trainer.key", EPOCH) as client:
        judging = asyncio.create_task(judge(client))
        await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b""))
        await work(client, range(10))
        before = memory().rss
        received = threading.Event()
        floods = asyncio.gather(
            asyncio.to_thread(flood, ends.agents, agent, FRAMES * 4 // 5, seed, received),
            asyncio.to_thread(flood, ends.trainer, trainer, FRAMES // 5, seed + 1, received),
            asyncio.to_thread(storm, ends.agents, STRANGERS // 2, FRAMES // STRANGERS, seed + 2),
            asyncio.to_thread(storm, ends.trainer, STRANGERS // 2, FRAMES // STRANGERS, seed + 3),
            asyncio.to_thread(wrong_keys, ends.agents, ends.public_key, WRONG_KEYS, received),
        )
        rounds = 10
        arrival = asyncio.create_task(all_received(ends, folder / "keys"))
        while not arrival.done():
            await work(client, range(rounds, rounds + 1))
            rounds += 1
        received.set()
        await floods
        await work(client, range(rounds, rounds + 10))
        grown = memory().rss - before
        text = await metrics(ends, folder / "keys")
        print(f"{rounds - 10} rounds of work beside the floods, memory grew by {grown / 1e6:.1f} MB")
        assert grown < GROWTH_BYTES
        # libzmq dials again by itself, so on a busy machine a stranger may be refused twice before he is gone.
        assert count_of('polyrl_handshakes_refused_total{socket="agents"}', text) >= WRONG_KEYS
        assert count_of('polyrl_frames_dropped_total{kind="undecodable",socket="agents"}', text) > FRAMES // 4
        judging.cancel()
        await client.finish(True, "")
    await asyncio.wait_for(asyncio.gather(*agents), DEADLINE_S)
    context.term()
