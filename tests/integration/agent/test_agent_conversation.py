"""The agent over real sockets, against a manager that the test plays: exact under every loss, leaving in good order."""

from __future__ import annotations

import asyncio

import pytest

from polyrl.sample import Finish
from polyrl.wire import (
    Cancel,
    Deltas,
    Deregister,
    Fenced,
    HandBack,
    Heartbeat,
    Hello,
    Leaving,
    Recall,
    StartDrain,
    WeightsFailed,
)
from polyrl_rollout.agent import link
from polyrl_rollout.agent.app import EXIT_DONE, EXIT_FAILED
from tests.integration.agent.played_manager import (
    DEADLINE_S,
    DRAIN_S,
    PlayedManager,
    Rig,
    undisturbed,
)


async def test_greets_serves_and_generates_exactly(rig: Rig) -> None:
    first = await rig.manager.receive(Hello)
    assert (first.weight_version, first.max_running, first.max_context) == (-1, 32, 512)
    await rig.serve(0)
    assert rig.manager.all_of(Hello)[-1].max_running == 16, "the engine, once started, is asked what it is"
    for number in range(12):
        await rig.assign(number)
    await rig.finished(range(12))
    assert rig.manager.tokens == {number: undisturbed(number, 40) for number in range(12)}
    assert set(rig.manager.finish.values()) == {Finish.LENGTH.value}
    assert {version for versions in rig.manager.versions.values() for version in versions} == {0}
    await rig.manager.receive(Heartbeat)
    assert rig.manager.delta_bytes <= 16 * 12 * 40
    print("bytes per token:", rig.manager.delta_bytes / (12 * 40))


async def test_bytes_per_token_do_not_grow_with_length(rig: Rig) -> None:
    await rig.serve(0)
    costs = []
    for start, budget in ((0, 40), (100, 480)):
        before = rig.manager.delta_bytes
        for number in range(start, start + 8):
            await rig.assign(number, budget)
        await rig.finished(range(start, start + 8))
        costs.append((rig.manager.delta_bytes - before) / (8 * budget))
    print("bytes per token at 40 and 480 tokens:", costs)
    assert max(costs) <= 16


async def test_bytes_per_token_stay_low_when_tokens_come_one_by_one(rig: Rig) -> None:
    rig.engine.tokens_per_second, rig.engine.chunk_tokens = 60, 1
    await rig.serve(0)
    for number in range(12):
        await rig.assign(number, budget=60)
    await rig.finished(range(12))
    print("bytes per token:", rig.manager.delta_bytes / (12 * 60))
    assert rig.manager.delta_bytes <= 16 * 12 * 60


async def test_a_continuation_goes_on_where_the_other_engine_stopped(rig: Rig) -> None:
    await rig.serve(0)
    rig.manager.tokens[3] = undisturbed(3, 25)
    await rig.assign(3, budget=15, offset=25)
    await rig.finished(range(3, 4))
    assert rig.manager.tokens[3] == undisturbed(3, 40)


async def test_a_manager_that_dies_mid_stream_gets_everything_when_it_is_back(rig: Rig) -> None:
    rig.engine.tokens_per_second = 400
    await rig.serve(0)
    for number in range(8):
        await rig.assign(number, budget=200)
    await rig.manager.until(lambda: sum(map(len, rig.manager.tokens.values())) > 100, "tokens")
    old = rig.manager
    await old.close()
    await asyncio.sleep(0.2)  # tokens are generated meanwhile, for nobody
    rig.manager = PlayedManager(rig.manager_keys)
    for number, tokens in old.tokens.items():
        rig.manager.tokens[number] = tokens[: len(tokens) // 2]
    hello = await rig.manager.receive(Hello)
    assert {held.assignment: held.length for held in hello.held}.keys() == set(range(8))
    await rig.finished(range(8))
    assert rig.manager.tokens == {number: undisturbed(number, 200) for number in range(8)}
    assert not rig.manager.repeated


async def test_frames_that_nobody_confirms_are_sent_again_after_a_greeting(rig: Rig) -> None:
    await rig.serve(0)
    rig.manager.keeps = False
    await rig.assign(1)
    await rig.finished(range(1, 2))
    assert rig.agent.book.held()[0].length == 40
    rig.manager.tokens, rig.manager.finish, rig.manager.keeps = {}, {}, True
    assert rig.agent.manager.link is not None
    rig.agent.manager.link.fail("for the test")
    await rig.finished(range(1, 2))
    assert rig.manager.tokens == {1: undisturbed(1, 40)}
    await rig.manager.until(lambda: not rig.agent.book.streams, "forgetting")


async def test_cancel_ends_a_stream_without_a_word(rig: Rig) -> None:
    rig.engine.tokens_per_second = 100
    await rig.serve(0)
    await rig.assign(1, budget=500)
    await rig.manager.receive(Deltas)
    await rig.manager.send(Cancel(1))
    await rig.assign(2, budget=8)
    await rig.finished(range(2, 3))
    assert 1 not in rig.agent.book.streams
    assert rig.engine.aborted
    assert not rig.manager.all_of(HandBack)


async def test_what_is_to_be_returned_comes_with_all_its_tokens(rig: Rig) -> None:
    rig.engine.tokens_per_second = 100
    await rig.serve(0)
    await rig.assign(1, budget=500)
    await rig.assign(2, budget=500)
    await rig.manager.receive(Deltas)
    stream = rig.agent.book.streams[1]
    await rig.manager.send(Recall(1))
    assert await rig.manager.receive(HandBack) == HandBack(1, "asked")
    assert rig.manager.tokens[1] == undisturbed(1, 500)[: stream.length], "all that the engine made"
    assert len(rig.engine.aborted) == 1
    await rig.manager.receive(Deltas)
    assert 1 not in rig.agent.book.streams, "the other one goes on"
    assert 2 in rig.agent.book.streams


async def test_a_request_that_cannot_be_is_rejected_and_the_others_go_on(rig: Rig) -> None:
    await rig.serve(0)
    await rig.assign(1, budget=5000)
    await rig.assign(2)
    returned = await rig.manager.receive(HandBack)
    assert (returned.assignment, returned.reason) == (1, "rejected")
    await rig.finished(range(2, 3))


async def test_what_no_engine_may_raise_is_handed_back_and_the_engine_goes_on(rig: Rig) -> None:
    await rig.serve(0)
    rig.engine.raises = KeyError("not of the port")
    await rig.assign(1)
    returned = await rig.manager.receive(HandBack)
    assert (returned.assignment, returned.reason) == (1, "engineError")
    assert "not of the port" in returned.detail
    await rig.assign(2)
    await rig.finished(range(2, 3))


async def test_its_load_is_reported_while_tokens_flow(rig: Rig) -> None:
    rig.engine.tokens_per_second = 100
    await rig.serve(0)
    await rig.assign(1, budget=900)
    await rig.manager.receive(Deltas)
    before = len(rig.manager.all_of(Heartbeat))
    busy = await rig.manager.receive(Heartbeat, before + 3)
    assert 1 not in rig.manager.finish
    assert (busy.running, busy.kv_free_tokens < 4096, busy.newest) == (1, True, 1)


async def test_a_drain_finishes_the_short_returns_the_long_and_says_goodbye(rig: Rig) -> None:
    rig.engine.tokens_per_second = 100
    await rig.serve(0)
    await rig.assign(1, budget=120)
    await rig.assign(2, budget=900)
    await rig.manager.until(lambda: len(rig.manager.tokens.get(2, [])) > 20, "tokens")
    begun = asyncio.get_running_loop().time()
    await rig.manager.send(StartDrain(DRAIN_S, "test"))
    await rig.assign(3)
    assert await rig.exit_code() == EXIT_DONE
    await rig.manager.receive(Deregister)
    assert asyncio.get_running_loop().time() - begun < DRAIN_S
    assert rig.manager.finish == {1: "length"}
    assert {(r.assignment, r.reason) for r in rig.manager.all_of(HandBack)} == {(2, "draining"), (3, "draining")}
    assert rig.manager.tokens[1] == undisturbed(1, 120)
    assert rig.manager.tokens[2] == undisturbed(2, 900)[: len(rig.manager.tokens[2])]


async def test_a_notice_is_reported_and_leads_to_a_drain_even_when_the_manager_stays_silent(rig: Rig) -> None:
    rig.engine.tokens_per_second = 50
    await rig.serve(0)
    await rig.assign(1, budget=900)
    await rig.manager.receive(Deltas)
    rig.agent.notice()
    assert (await rig.manager.receive(Leaving)).deadline_s == 4.0
    assert await rig.exit_code() == EXIT_DONE
    await rig.manager.receive(Deregister)
    assert [r.reason for r in rig.manager.all_of(HandBack)] == ["draining"]


async def test_a_notice_while_the_manager_is_away_loses_no_token(rig: Rig) -> None:
    rig.engine.tokens_per_second = 100
    await rig.serve(0)
    await rig.assign(1, budget=40)
    await rig.assign(2, budget=900)
    await rig.manager.until(lambda: len(rig.manager.tokens.get(2, [])) > 8, "tokens")
    old = rig.manager
    await old.close()
    await asyncio.sleep(0.2)
    rig.agent.notice(5.0)
    async with asyncio.timeout(DEADLINE_S):
        streams = rig.agent.book.streams
        while not any(one.given_back for one in streams.values()):  # noqa: ASYNC110 - no event marks the end of generation
            await asyncio.sleep(0.02)
    length = rig.agent.book.streams[2].length
    rig.manager = PlayedManager(rig.manager_keys)
    rig.manager.tokens = {number: list(tokens) for number, tokens in old.tokens.items()}
    rig.manager.finish = dict(old.finish)
    assert await rig.exit_code() == EXIT_DONE
    await rig.manager.receive(Deregister)  # the last frame: what was sent before it has been read by then
    assert rig.manager.tokens == {1: undisturbed(1, 40), 2: undisturbed(2, length)}
    hello = rig.manager.all_of(Hello)[-1]
    assert hello.leaving_s is not None
    assert 0 < hello.leaving_s < 5.0
    assert (hello.versions, hello.leaving_reason) == ((0,), "SIGTERM")
    assert [back.assignment for back in rig.manager.all_of(HandBack)] == [2]


async def test_fenced_forgets_everything_and_greets_anew_then_gives_up(rig: Rig) -> None:
    rig.engine.tokens_per_second = 50
    await rig.serve(0)
    await rig.assign(1, budget=900)
    await rig.manager.receive(Deltas)
    count = len(rig.manager.all_of(Hello))
    await rig.manager.send(Fenced("the lease is over", lease_over=True))
    again = await rig.manager.receive(Hello, count + 1)
    assert [held.assignment for held in again.held] == [1], "its lease alone is over: it goes on"
    await rig.manager.send(Fenced("the run is another one"))
    again = await rig.manager.receive(Hello, count + 2)
    assert again.held == ()
    assert again.weight_version == 0
    rig.manager.welcomes = False
    for _ in range(3):
        count = len(rig.manager.all_of(Hello))
        await rig.manager.send(Fenced("another epoch"))
        if rig.task.done():
            break
        await asyncio.wait({rig.task, asyncio.create_task(rig.manager.receive(Hello, count + 1))}, timeout=DEADLINE_S,
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
    assert await rig.exit_code() == EXIT_FAILED


async def test_a_broken_engine_returns_everything_and_ends_the_agent(rig: Rig) -> None:
    rig.engine.tokens_per_second = 100
    await rig.serve(0)
    for number in range(3):
        await rig.assign(number, budget=500)
    await rig.manager.until(lambda: len(rig.manager.tokens) == 3, "tokens")
    rig.engine.broken = True
    assert await rig.exit_code() == EXIT_FAILED
    await rig.manager.receive(Deregister)
    assert {(r.assignment, r.reason) for r in rig.manager.all_of(HandBack)} == {(n, "engineError") for n in range(3)}


async def test_a_part_of_the_agent_that_breaks_returns_everything_and_ends_it(rig: Rig) -> None:
    rig.engine.tokens_per_second = 100
    await rig.serve(0)
    await rig.assign(1, budget=500)
    await rig.manager.until(lambda: 1 in rig.manager.tokens, "tokens")

    async def breaks() -> None:
        raise ValueError("a bug")

    rig.agent.spawn(breaks())
    assert await rig.exit_code() == EXIT_FAILED
    assert (await rig.manager.receive(Deregister)).reason == "a part of the agent broke: a bug"
    assert [(back.assignment, back.reason) for back in rig.manager.all_of(HandBack)] == [(1, "engineError")]


async def test_an_agent_ends_although_what_broke_in_it_cannot_be_given_back(rig: Rig) -> None:
    await rig.serve(0)

    def breaks(*args: object, **kwargs: object) -> None:
        raise ValueError("a bug in the book")

    rig.agent.book.pack = breaks  # type: ignore[method-assign,assignment]
    await rig.assign(1, budget=500)
    assert await rig.exit_code() == EXIT_FAILED


async def test_an_engine_that_died_idle_is_noticed_at_the_next_version(rig: Rig) -> None:
    await rig.serve(0)
    rig.engine.broken = True
    await rig.manager.send(rig.announcement(1))
    assert await rig.exit_code() == EXIT_FAILED
    assert (await rig.manager.receive(WeightsFailed)).version == 1
    await rig.manager.receive(Deregister)


async def test_cut_off_for_a_moment_everything_comes_late_and_in_order(rig: Rig) -> None:
    rig.engine.tokens_per_second = 400
    await rig.serve(0)
    await rig.assign(1, budget=200)
    await rig.manager.until(lambda: len(rig.manager.tokens.get(1, [])) > 10, "tokens")
    greetings = len(rig.manager.all_of(Hello))
    rig.agent.manager.partition()
    left = rig.agent.book.seq
    await rig.assign(2)
    await rig.manager.until(lambda: rig.manager.all_of(Deltas)[-1].seq >= left, "tokens that had left before")
    received = len(rig.manager.received)
    await asyncio.sleep(0.5)
    assert len(rig.manager.received) == received
    assert 2 not in rig.agent.book.streams
    rig.agent.manager.heal()
    await rig.finished(range(1, 3))
    assert rig.manager.tokens == {1: undisturbed(1, 200), 2: undisturbed(2, 40)}
    assert len(rig.manager.all_of(Hello)) == greetings


async def test_a_partition_whose_end_was_handled_first_is_over(rig: Rig) -> None:
    """Threads of a stopped process may take the two signals in either order."""
    await rig.serve(0)
    rig.agent.manager.heal()
    rig.agent.manager.partition()
    await rig.assign(1)
    await rig.finished([1])
    assert rig.manager.tokens == {1: undisturbed(1, 40)}


async def test_one_that_is_cut_off_in_one_direction_goes_on_in_the_other(rig: Rig) -> None:
    rig.engine.tokens_per_second = 400
    await rig.serve(0)
    await rig.assign(1, budget=200)
    await rig.manager.until(lambda: len(rig.manager.tokens.get(1, [])) > 10, "tokens")
    rig.agent.manager.partition(inward=True, outward=False)
    await rig.assign(2)
    await rig.manager.until(lambda: len(rig.manager.tokens.get(1, [])) > 50, "tokens")
    assert 2 not in rig.agent.book.streams
    rig.agent.manager.heal()
    await rig.finished(range(1, 3))
    rig.agent.manager.partition(inward=False, outward=True)
    await asyncio.sleep(0.1)  # what had left before arrives
    received = len(rig.manager.received)
    await rig.assign(3)
    await asyncio.sleep(0.5)
    assert 3 in rig.agent.book.streams, "it hears, and generates"
    assert len(rig.manager.received) == received
    rig.agent.manager.heal()
    await rig.finished(range(3, 4))
    assert rig.manager.tokens[1] == undisturbed(1, 200)


@pytest.mark.parametrize(("inward", "outward"), [(True, False), (False, True)])
async def test_a_link_needs_both_directions_for_longer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, inward: bool, outward: bool
) -> None:
    monkeypatch.setattr(link, "PARTITION_TOLERATED_S", 0.2)
    await rig.serve(0)
    greetings = len(rig.manager.all_of(Hello))
    rig.agent.manager.partition(inward, outward)
    await asyncio.sleep(0.6)
    assert len(rig.manager.all_of(Hello)) == greetings, "it cannot dial"
    rig.agent.manager.heal()
    await rig.manager.receive(Hello, greetings + 1)


async def test_cut_off_for_longer_than_heartbeats_wait_it_greets_anew(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "PARTITION_TOLERATED_S", 0.2)
    rig.engine.tokens_per_second = 400
    await rig.serve(0)
    await rig.assign(1, budget=300)
    await rig.manager.until(lambda: len(rig.manager.tokens.get(1, [])) > 10, "tokens")
    greetings = len(rig.manager.all_of(Hello))
    rig.agent.manager.partition()
    await rig.assign(2)  # lost with the connection
    await asyncio.sleep(0.6)
    assert len(rig.manager.all_of(Hello)) == greetings
    rig.agent.manager.heal()
    await rig.manager.receive(Hello, greetings + 1)
    await rig.finished(range(1, 2))
    assert rig.manager.tokens == {1: undisturbed(1, 300)}
    assert 2 not in rig.agent.book.streams
