"""The agent over real sockets, against a manager that the test plays: exact under every loss, leaving in good order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio
from safetensors.torch import load_file

from polyrl.keys import AgentKeys, TrainerKeys, format_keys
from polyrl.sample import Finish, Pool, SamplingParams
from polyrl.wire import (
    FINISH_CODES,
    ROW_DTYPE,
    Announce,
    Assign,
    Cancel,
    Deltas,
    Deregister,
    EngineCapacity,
    Fenced,
    FromAgent,
    HandBack,
    Heartbeat,
    Hello,
    Leaving,
    Recall,
    Resend,
    StartDrain,
    ToAgent,
    TokensKept,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
    check_deltas,
    decode_from_agent,
    encode,
    pack_ids,
    unpack_ids,
)
from polyrl_rollout.agent import link
from polyrl_rollout.agent.app import EXIT_DONE, EXIT_FAILED, Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.testing.fake_engine import FakeEngine, continuation
from polyrl_rollout.weights.staging import Staging
from polyrl_rollout.weights.versions import MAX_WEIGHTS_FAILURES
from polyrl_trainer.weights.publisher import WeightPublisher
from polyrl_trainer.weights.server import WeightServer

ENGINE = "engine-1"
DEADLINE_S = 30.0
DRAIN_S = 8.0
"""From here on the whole reserve of 2 s lies between the last token and the deadline; 900 tokens take 9 s."""
PROMPT = [5, 6, 7]
M = TypeVar("M", bound=FromAgent)


def pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class PlayedManager:
    """A ROUTER whose words the test chooses; it takes tokens as a ledger does."""

    def __init__(self, keys: tuple[str, str], endpoint: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = (key.encode() for key in keys)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.identity = b""
        self.received: list[FromAgent] = []
        self.tokens: dict[int, list[int]] = {}
        self.versions: dict[int, list[int]] = {}
        self.finish: dict[int, str | None] = {}
        self.delta_bytes = 0
        self.repeated = 0
        """Tokens that came although they had come before."""
        self.keeps = self.welcomes = True
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def send(self, message: ToAgent) -> None:
        await self._socket.send_multipart([self.identity, encode(message)])

    async def receive(self, kind: type[M], count: int = 1) -> M:
        """The `count`-th message of its kind, waited for."""
        await self.until(lambda: len(self.all_of(kind)) >= count, kind.__name__)
        return self.all_of(kind)[count - 1]

    def all_of(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S), self._news:
                await self._news.wait_for(holds)
        except TimeoutError:
            raise AssertionError(f"no {what}; heard {[type(message).__name__ for message in self.received]}") from None

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _read(self) -> None:
        while True:
            self.identity, frame = await self._socket.recv_multipart()
            message = decode_from_agent(frame)
            if isinstance(message, Hello) and self.welcomes:
                await self._welcome(message)
            elif isinstance(message, Deltas):
                self.delta_bytes += len(frame)
                await self._take(message)
            async with self._news:
                self.received.append(message)
                self._news.notify_all()

    async def _welcome(self, hello: Hello) -> None:
        for held in hello.held:
            number = held.assignment
            over = number in self.finish
            await self.send(Cancel(number) if over else Resend(number, len(self.tokens.get(number, []))))
        await self.send(Welcome(1, 3.0, beat_s=0.1, delta_s=0.02))

    async def _take(self, deltas: Deltas) -> None:
        check_deltas(deltas)
        ids, at = unpack_ids(deltas.ids).tolist(), 0
        for row in np.frombuffer(deltas.rows, dtype=ROW_DTYPE):
            number, offset, count = int(row["assignment"]), int(row["offset"]), int(row["count"])
            new, at = ids[at : at + count], at + count
            have = self.tokens.setdefault(number, [])
            if offset > len(have):
                await self.send(Resend(number, len(have)))
                continue
            fresh = new[len(have) - offset :]
            self.repeated += count - len(fresh)
            have += fresh
            self.versions.setdefault(number, []).extend([deltas.version] * len(fresh))
            if row["finish"]:
                self.finish[number] = FINISH_CODES[row["finish"]]
        if self.keeps:
            await self.send(TokensKept(deltas.seq))


class Rig:
    """One agent with a fake engine, a publisher and a played manager."""

    def __init__(self, folder: Path) -> None:
        self.manager_keys, agent, trainer = pair(), pair(), pair()
        self.trainer_file = folder / "trainer.key"
        self.trainer_file.touch(mode=0o600)
        self.trainer_file.write_text(format_keys(TrainerKeys(*trainer, self.manager_keys[0], agent[0])))
        self.manager = PlayedManager(self.manager_keys)
        self.publisher = WeightPublisher(self.trainer_file)
        self.engine = FakeEngine(EngineCapacity(max_running=16, kv_tokens=4096, max_context=1024))
        keys = AgentKeys(*agent, self.manager_keys[0], trainer[0])
        settings = AgentSettings(
            lambda: self.manager.endpoint, keys, run_epoch=1, engine=ENGINE, pool=Pool.SPOT, drain_s=4.0, seed=0
        )
        self.staging = Staging("run", ENGINE, folder)
        self.agent = Agent(settings, self.engine, EngineCapacity(32, 1 << 16, max_context=512), self.staging)
        self.task = asyncio.create_task(self.agent.run())

    def announcement(self, version: int) -> Announce:
        published = self.publisher.publish(
            version, {"w": torch.full((7,), float(version))}.items(), {"config.json": b"{}"}
        )
        return Announce.of(published)

    async def serve(self, version: int = 0) -> None:
        await self.manager.receive(Hello)
        before = len(self.manager.all_of(WeightsLoaded))
        await self.manager.send(self.announcement(version))
        assert (await self.manager.receive(WeightsLoaded, before + 1)).version == version

    async def assign(self, number: int, budget: int = 40, offset: int = 0, newest: int = 0) -> None:
        prompt = [*PROMPT, number]
        ids = prompt + continuation(prompt, offset)
        sampling = SamplingParams(max_new_tokens=offset + budget)
        await self.manager.send(
            Assign(
                number,
                f"{number}.0",
                attempt=0,
                input_ids=pack_ids(ids),
                offset=offset,
                max_new_tokens=budget,
                sampling=sampling,
                min_version=0,
                max_version=newest,
            )
        )

    async def finished(self, numbers: range) -> None:
        await self.manager.until(lambda: all(n in self.manager.finish for n in numbers), f"end of {numbers}")

    async def exit_code(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.task

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.manager.close()
        self.publisher.close()
        self.staging.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.close()


def undisturbed(number: int, budget: int) -> list[int]:
    return continuation([*PROMPT, number], budget)


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
    assert (busy.running, busy.kv_free_tokens < 4096) == (1, True)


async def test_work_for_another_version_is_returned(rig: Rig) -> None:
    await rig.manager.receive(Hello)
    await rig.assign(1)
    returned = await rig.manager.receive(HandBack)
    assert (returned.assignment, returned.reason) == (1, "versionChanged")


async def test_at_a_switch_fitting_sequences_go_on_and_others_are_returned_with_their_tokens(rig: Rig) -> None:
    rig.engine.tokens_per_second = 10  # until the switch, so that it comes in the middle
    await rig.serve(0)
    await rig.assign(1, budget=100, newest=1)
    await rig.assign(2, budget=100, newest=0)
    await rig.manager.until(lambda: set(rig.manager.tokens) == {1, 2}, "tokens of both")
    await rig.serve(1)
    rig.engine.tokens_per_second = 200
    assert rig.engine.version == 1
    returned = await rig.manager.receive(HandBack)
    assert (returned.assignment, returned.reason) == (2, "versionChanged")
    assert rig.manager.tokens[2] == undisturbed(2, 100)[: len(rig.manager.tokens[2])]
    await rig.finished(range(1, 2))
    assert rig.manager.tokens[1] == undisturbed(1, 100)
    assert sorted(set(rig.manager.versions[1])) == [0, 1]
    assert rig.manager.versions[1] == sorted(rig.manager.versions[1])


async def test_what_an_engine_keeps_runs_on_through_a_switch(rig: Rig) -> None:
    rig.engine.keeps, rig.engine.tokens_per_second = True, 10
    await rig.serve(0)
    await rig.assign(1, budget=100, newest=1)
    await rig.assign(2, budget=100, newest=0)
    await rig.manager.until(lambda: set(rig.manager.tokens) == {1, 2}, "tokens of both")
    await rig.serve(1)
    rig.engine.tokens_per_second = 200
    returned = await rig.manager.receive(HandBack)
    assert (returned.assignment, returned.reason) == (2, "versionChanged")
    await rig.finished(range(1, 2))
    assert (rig.engine.begun, len(rig.engine.aborted)) == (2, 1), "nothing is read again"
    assert rig.manager.tokens[1] == undisturbed(1, 100)
    assert (rig.manager.versions[1], set(rig.manager.versions[1])) == (sorted(rig.manager.versions[1]), {0, 1})


async def test_what_has_not_begun_begins_with_the_new_weights_also_where_requests_are_kept(rig: Rig) -> None:
    rig.engine.keeps = True
    await rig.serve(0)
    rig.engine.hang.set()
    await rig.assign(1, newest=1)
    await rig.manager.until(lambda: rig.engine.begun == 1, "a request")
    await rig.serve(1)
    rig.engine.hang.clear()
    await rig.finished(range(1, 2))
    assert (rig.engine.begun, set(rig.manager.versions[1])) == (2, {1})


async def test_weights_that_do_not_load_leave_the_old_version_serving(rig: Rig) -> None:
    await rig.serve(0)
    rig.engine.refuse_weights = True
    await rig.manager.send(rig.announcement(1))
    failed = await rig.manager.receive(WeightsFailed)
    assert (failed.version, failed.serving) == (1, 0)
    await rig.assign(1)
    await rig.finished(range(1, 2))
    rig.engine.refuse_weights = False
    await rig.serve(1)
    assert [folder.name for folder in rig.staging.root.glob("v*")] == ["v000001"]


async def test_what_changed_is_pulled_onto_what_is_served(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightServer, "bandwidth", 1e3)  # so slow that a delta of kilobytes pays
    rig.publisher.forms.smallest = 0
    await rig.manager.receive(Hello)
    weights = torch.zeros(5000)
    for version in range(3):
        weights[version] = 1.0
        published = rig.publisher.publish(version, {"w": weights}.items(), {"config.json": b"{}"})
        await rig.manager.send(Announce.of(published))
        loaded = await rig.manager.receive(WeightsLoaded, version + 1)
        assert (loaded.version, loaded.receipt) == (version, published.receipt)
        assert (loaded.bytes_pulled < 200) == (version > 0)
    (folder,) = rig.staging.root.glob("v*")
    assert torch.equal(load_file(folder / "model.safetensors")["w"], weights)


async def test_an_engine_that_never_loads_a_version_ends_with_the_reason(rig: Rig) -> None:
    await rig.serve(0)
    rig.engine.refuse_weights = True
    announced = rig.announcement(1)
    for count in range(1, MAX_WEIGHTS_FAILURES + 1):
        await rig.manager.send(announced)
        await rig.manager.receive(WeightsFailed, count)
    assert await rig.exit_code() == EXIT_FAILED
    assert "does not fit the model" in (await rig.manager.receive(Deregister)).reason


async def test_what_is_recalled_during_a_switch_does_not_start_again(rig: Rig) -> None:
    rig.engine.tokens_per_second = 10
    await rig.serve(0)
    await rig.assign(1, budget=100, newest=1)
    await rig.manager.receive(Deltas)
    rig.engine.loading.clear()
    await rig.manager.send(rig.announcement(1))
    await rig.manager.until(lambda: bool(rig.engine.aborted), "a switch")
    begun = rig.engine.begun
    rig.agent._protocol.receive(Recall(1), 0.0)
    rig.agent.handle(Recall(1))
    rig.agent._continue()  # the switch ends before what was recalled has been handed back
    rig.engine.loading.set()
    await rig.manager.receive(WeightsLoaded, 2)
    await rig.manager.receive(HandBack)
    assert rig.engine.begun == begun


async def test_a_newer_announcement_supersedes_a_pull_that_hangs(rig: Rig) -> None:
    await rig.manager.receive(Hello)
    good = rig.announcement(1)
    await rig.manager.send(Announce(0, "tcp://127.0.0.1:1", public_key=good.public_key, manifest_hash=b"x" * 16))
    await rig.manager.send(good)
    assert (await rig.manager.receive(WeightsLoaded)).version == 1
    assert not rig.manager.all_of(WeightsFailed)


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
        while not rig.agent._protocol._undelivered:  # noqa: ASYNC110 - no event marks the end of generation
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
