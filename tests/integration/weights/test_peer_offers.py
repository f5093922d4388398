"""Agents that nobody can dial: they open connections on which they are asked."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from polyrl import wire
from polyrl.weights.neighbours import LONGEST_PAUSE_S
from polyrl.wire.sealing import PeerKeys
from polyrl.wire.serving import Content
from polyrl_rollout.weights.peers.offers import UNDIALLED_S
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.weights.conftest import FILES
from tests.integration.weights.peer_fleet import (
    PULLED_S,
    Fleet,
    ask,
    claims_all,
    content,
    is_right,
    pull,
    sent_by_publisher,
    turned,
    weights,
)
from tests.integration.weights.test_weight_plane_faults import held


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
    late, offers = time.monotonic() + LONGEST_PAUSE_S, fleet.swarms["behind"]._offers
    assert fleet.swarms["joiner"]._offers._choose(late) is None
    assert "joiner" in offers._open or offers._choose(late) == "joiner", "it has offered again meanwhile, or will"


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


async def test_where_no_thread_is_left_for_an_offer_it_is_made_later(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyrl.weights.neighbours.FIRST_PAUSE_S", 0.1)
    start, refused = threading.Thread.start, list[str]()

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "peer-offer" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    fleet.hidden("hidden")
    fleet.agent("e")
    await fleet.offered("e", by="hidden")
    assert refused == ["peer-offer"]


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
