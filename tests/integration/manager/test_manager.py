"""The manager over real sockets: work goes through whole, strangers get nothing, odd peers change nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq

from polyrl.errors import RunFailed
from polyrl.keys import AgentKeys, TrainerKeys, read_keys
from polyrl.sample import Pool
from polyrl.wire import WIRE_VERSION, Fenced, Heartbeat, Hello, TrainerHello, Welcome, decode_to_agent, encode

EPOCH = 3
DEADLINE_S = 60.0
LONG = 2000
"""Tokens of a response that an engine is still busy with when it is cut short."""


def hello(name: str, run_epoch: int = EPOCH) -> Hello:
    return Hello(run_epoch, name, pool=Pool.SPOT, max_running=4, kv_tokens=1000, max_context=1000, weight_version=-1)


async def test_work_goes_through_whole_and_the_end_is_orderly(site: Any) -> None:
    agents = [asyncio.create_task(site.agent(f"engine-{i}").run()) for i in range(2)]
    async with site.client() as client:
        samples = await site.run_work(client, [site.group(number) for number in range(8)])
        assert {len(sample.response.ids) for sample in samples} == {4 * 40}
        assert len({sample.response.sample for sample in samples}) == 32
        await client.finish(True, "done")
        await asyncio.wait_for(asyncio.gather(*agents), DEADLINE_S)
        await asyncio.wait_for(asyncio.shield(site.running), DEADLINE_S)
    status = site.manager.status()
    assert (status.samples.submitted, status.samples.acknowledged, status.samples.open) == (32, 32, 0)
    assert (status.finished, status.ok, status.message) == (True, True, "done")
    assert status.tokens.generated == 32 * 40
    assert status.delta_bytes / status.tokens.generated <= 16


async def test_an_engine_that_vanishes_costs_no_sample(site: Any) -> None:
    victim, survivor = site.agent("victim"), site.agent("survivor")
    dying, living = asyncio.create_task(victim.run()), asyncio.create_task(survivor.run())
    async with site.client() as client:
        work = asyncio.create_task(site.run_work(client, [site.group(number, tokens=LONG) for number in range(8)]))
        await site.eventually(lambda: victim.tokens_made >= 200)
        dying.cancel()
        samples = await asyncio.wait_for(work, DEADLINE_S)
    assert {len(sample.response.ids) for sample in samples} == {4 * LONG}
    engines = {span.engine for sample in samples for span in sample.response.spans}
    assert engines == {"victim", "survivor"}
    assert site.manager.status().engines_lost == 1
    living.cancel()


async def test_a_peer_without_the_right_key_gets_nothing(site: Any) -> None:
    agent, trainer = read_keys(AgentKeys, site.keys / "agent.key"), read_keys(TrainerKeys, site.keys / "trainer.key")
    stranger = [key.decode() for key in zmq.curve_keypair()]
    ends = site.manager.endpoints
    attempts = [
        (ends.agents, *stranger, encode(hello("x"))),
        (ends.trainer, *stranger, encode(TrainerHello(EPOCH, -1))),
        (ends.agents, trainer.public_key, trainer.secret_key, encode(hello("x"))),
        (ends.trainer, agent.public_key, agent.secret_key, encode(TrainerHello(EPOCH, -1))),
    ]
    sockets = [site.dealer(endpoint, public, secret, b"x") for endpoint, public, secret, _ in attempts]
    for socket, (*_, frame) in zip(sockets, attempts, strict=True):
        await socket.send(frame)
    bare = site.context.socket(zmq.DEALER)
    bare.connect(ends.agents)
    await bare.send(encode(hello("x")))
    await site.eventually(lambda: site.manager.authenticator.refused.total() >= len(attempts))
    assert await asyncio.gather(*(socket.poll(500) for socket in [*sockets, bare])) == [0] * 5
    assert not site.manager.status().engines
    assert not site.manager.status().trainer_connected
    assert [traffic.frames_in for traffic in site.manager.traffic.values()] == [0, 0]


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (b"\x01garbage", "undecodable"),
        (b"", "undecodable"),
        (encode(hello("engine-2")), "identity"),
    ],
)
async def test_an_odd_frame_is_counted_and_dropped(site: Any, frame: bytes, kind: str) -> None:
    socket = site.agent_socket("engine-1")
    await socket.send(frame)
    dropped = site.manager.traffic["agents"].dropped
    await site.eventually(dropped.total)
    assert dropped == {kind: 1}
    assert await socket.poll(50) == 0
    assert not site.manager.status().engines


@pytest.mark.parametrize("version", [0, 2, 255])
async def test_a_peer_of_another_wire_version_is_answered_in_its_own(site: Any, version: int) -> None:
    """Nobody said a word: a run with parts of two versions stood still until a deadline that named neither."""
    trainer = read_keys(TrainerKeys, site.keys / "trainer.key")
    pair = (trainer.public_key, trainer.secret_key)
    peers = [
        (site.agent_socket("engine-1"), encode(hello("engine-1"))),
        (site.dealer(site.manager.endpoints.trainer, *pair, b"x"), encode(TrainerHello(EPOCH, -1))),
    ]
    for socket, frame in peers:
        await socket.send(bytes([version]) + frame[1:])
        async with asyncio.timeout(DEADLINE_S):
            answer = await socket.recv()
        assert answer[0] == version
        fenced = decode_to_agent(encode(hello(""))[:1] + answer[1:])
        assert isinstance(fenced, Fenced)
        assert f"speaks wire version {version}, the manager {WIRE_VERSION}" in fenced.reason
        assert fenced.lease_over is (socket is not peers[0][0]), "an agent's follower may be of the right one"
    assert [traffic.dropped for traffic in site.manager.traffic.values()] == [{"version": 1}] * 2
    assert not site.manager.status().engines


async def test_who_has_not_greeted_is_fenced(site: Any) -> None:
    socket = site.agent_socket("engine-1")
    await socket.send(encode(Heartbeat(0, 0, kv_free_tokens=0)))
    await socket.send(encode(hello("engine-1", run_epoch=EPOCH + 1)))
    await socket.send(encode(hello("engine-1")))
    async with asyncio.timeout(DEADLINE_S):
        answers = [decode_to_agent(await socket.recv()) for _ in range(3)]
    assert [type(answer) for answer in answers] == [Fenced, Fenced, Welcome]


async def test_an_engine_that_dials_again_takes_its_old_place(site: Any) -> None:
    for _ in range(3):
        socket = site.agent_socket("engine-1")
        await socket.send(encode(hello("engine-1")))
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(decode_to_agent(await socket.recv()), Welcome)
    assert [engine.name for engine in site.manager.status().engines] == ["engine-1"]


async def test_a_silent_engine_is_gone_after_its_lease(site: Any) -> None:
    socket = site.agent_socket("engine-1")
    await socket.send(encode(hello("engine-1")))
    await socket.recv()
    assert len(site.manager.status().engines) == 1
    await site.eventually(lambda: not site.manager.status().engines)
    assert site.manager.status().engines_lost == 1


async def test_a_broken_callback_ends_the_run_loudly(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(site.ledger, "from_agent", broken)
    agent = asyncio.create_task(site.agent("engine-1").run())
    with pytest.raises(RunFailed, match="the manager broke: a bug"):
        await asyncio.wait_for(asyncio.shield(site.running), DEADLINE_S)
    agent.cancel()
