"""Random schedules of the agent's conversation: the production `Conversation` and `AgentProtocol` of two agents, and
the production ledger, on an event loop whose clock jumps from one timer to the next. Connections break, messages and
frames are lost with them or on living ones, greetings go unanswered. Each turn comes once, and whole, and nothing that
an agent holds is waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from polyrl.keys import AgentKeys
from polyrl.ledger import Effects
from polyrl.ledger.causes import MoveCause
from polyrl.ledger.events import Moved
from polyrl.sample import Finish, Pool
from polyrl.wire import (
    Announce,
    Assign,
    Deltas,
    FromAgent,
    HandBackReason,
    Hello,
    Recall,
    TurnDone,
    WeightsLoaded,
    Welcome,
    pack_ids,
)
from polyrl_rollout.agent import conversation
from polyrl_rollout.agent.conversation import AgentSettings, Conversation
from polyrl_rollout.agent.link import LinkDown
from polyrl_rollout.agent.protocol import AgentProtocol, Stream
from polyrl_rollout.engines.port import TokenChunk
from polyrl_rollout.testing.simulation.model import logprobs_of
from polyrl_rollout.testing.stage import Stage

SCHEDULES = 30
SAMPLES = 24
STOP = 2
KEPT_WAIT_S = 5.0
"""After it an agent whose tokens nobody confirms breaks the connection, as the real one does."""
LONGEST_S = 600.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """Nothing waits for real: when all are idle, it is the next timer's time."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def text_of(sample: str) -> list[int]:
    rng = Random(sample)
    return [*(rng.randrange(3, 1000) for _ in range(rng.randrange(1, 60))), STOP]


class Transport:
    """Stands for the agent's link: in order, late, and lost with the connection."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name, self.alive = site, name, True
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._arrives = 0.0

    def send(self, message: FromAgent) -> None:
        if not self.alive:
            raise LinkDown("broken")
        if isinstance(message, Deltas) and self.site.rng.random() < self.site.frame_loss:
            return
        self._later(lambda: self.site.take(self, message))

    def deliver(self, message: Any) -> None:
        self._later(lambda: self._inbox.put_nowait(message))

    async def receive(self) -> Any:
        message = await self._inbox.get()
        if message is None:
            raise LinkDown("broken")
        return message

    def close(self, linger_s: float = 0.0) -> None:
        self.alive = False

    def fail(self) -> None:
        self.alive = False
        self._inbox.put_nowait(None)

    def _later(self, act: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._arrives = max(self._arrives, loop.time() + self.site.rng.uniform(0.001, 0.05))
        loop.call_at(self._arrives, lambda: act() if self.alive else None)


class Driver:
    """What the agent's app does, without an engine: tokens come from the sample's text."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name, self.version = site, name, -1
        self.protocol = AgentProtocol()
        keys = AgentKeys("p" * 40, "s" * 40, manager_public_key="m" * 40, trainer_public_key="t" * 40)
        settings = AgentSettings(lambda: name, keys, run_epoch=1, engine=name, pool=Pool.SPOT, drain_s=60.0, seed=1)
        self.conversation = Conversation(settings, self.protocol, self)

    def hello(self) -> Hello:
        book = self.protocol.book
        known = {"held": book.held(), "versions": book.versions(), "seq": book.seq}
        return Hello(1, self.name, Pool.SPOT, 8, 100_000, max_context=4096, weight_version=self.version, **known)

    def handle(self, message: Any) -> None:
        match message:
            case Announce(version):
                self.version = version
                self.conversation.send(WeightsLoaded(version, 0.1, load_seconds=0.1, bytes_pulled=1))
            case Assign():
                answer = self.protocol.accept(message, self.version)
                if isinstance(answer, Stream):
                    self.site.accepted.add(message.assignment)
                elif answer is not None:
                    self.conversation.send(answer)
            case Recall(assignment):
                self.give_back(assignment, HandBackReason.RECALLED)
            case Welcome():
                for one in self.protocol.undelivered():
                    self.give_back(one.assignment, HandBackReason(one.reason))

    def give_back(self, assignment: int, reason: HandBackReason) -> None:
        self.flush()
        given = self.protocol.hand_back(assignment, reason)
        if given is not None:
            self.conversation.send(given)

    async def reset(self) -> None:
        """Nothing runs beside the book."""

    def give_up(self, why: str) -> None:
        raise AssertionError(why)

    async def generate(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for stream in self.protocol.book.unfinished():
                if not stream.leaves:
                    text = text_of(stream.assign.sample)[stream.length :][: self.site.rng.randrange(1, 4)]
                    logprobs = [float(one) for one in memoryview(logprobs_of(pack(text))).cast("f")]
                    finish = Finish.STOP if text[-1] == STOP else None
                    chunk = TokenChunk(text, logprobs, version=self.version, finish=finish)
                    self.protocol.book.add(stream.assign.assignment, chunk, asyncio.get_running_loop().time())
            self.flush()

    def flush(self) -> None:
        link, now = self.conversation.link, asyncio.get_running_loop().time()
        if link is None or self.protocol.welcome is None:
            return
        for frame in self.protocol.book.pack(now, 0.03, flush=True):
            self.conversation.send(frame)
        oldest = self.protocol.book.oldest_unanswered()
        if oldest is not None and now - oldest > KEPT_WAIT_S:
            self.site.links[self.name].fail()


def pack(ids: list[int]) -> Any:
    return np.array(ids, dtype="<u4")


class Site:
    """The manager, its trainer, and two agents."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.frame_loss = self.rng.choice((0.0, 0.05, 0.2))
        self.links: dict[str, Transport] = {}
        self.stage = Stage()
        self.accepted = set[int]()
        """Assignments that an agent took."""
        self.turns = Counter[str]()
        self.texts: dict[str, bytes] = {}

    async def open_link(self, context: Any, endpoint: str, keys: Any, identity: bytes) -> Transport:
        engine = identity.decode().partition("/")[0]
        await asyncio.sleep(0.01)
        if self.rng.random() < 0.2:
            raise LinkDown("nobody answers")
        self.links[engine] = Transport(self, engine)
        return self.links[engine]

    def take(self, link: Transport, message: FromAgent) -> None:
        if self.links.get(link.name) is link:
            self.stage.now = asyncio.get_running_loop().time()
            self.carry(self.stage.agent(link.name, message))

    def carry(self, outcome: Effects) -> None:
        for name, message in outcome.to_agents:
            if name in self.links and self.links[name].alive:
                self.links[name].deliver(message)
        for message in outcome.to_trainer:
            if isinstance(message, TurnDone):
                sample = message.response.sample
                self.turns[sample] += 1
                self.texts[sample] = message.response.ids
                self.carry(self.stage.score(sample))

    async def run(self) -> None:
        drivers = [Driver(self, name) for name in ("a", "b")]
        tasks = [asyncio.create_task(driver.conversation.run(None)) for driver in drivers]  # type: ignore[arg-type]
        tasks += [asyncio.create_task(driver.generate()) for driver in drivers]
        self.carry(self.stage.submit(SAMPLES, max_new_tokens=100))
        loop = asyncio.get_running_loop()
        while len(self.turns) < SAMPLES and loop.time() < LONGEST_S:
            await asyncio.sleep(0.1)
            self.stage.now = loop.time()
            self.carry(self.stage.pass_time(0.0))
            if self.rng.random() < 0.03:
                self.rng.choice([*self.links.values()] or [Transport(self, "a")]).fail()
            assert not [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_each_turn_comes_once_and_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(seed)
    monkeypatch.setattr(conversation.AgentLink, "open", site.open_link)
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(site.run())
    assert site.turns == {f"{number}.0": 1 for number in range(SAMPLES)}
    moves = [event for event in site.stage.events if isinstance(event, Moved)]
    lost = [move for move in moves if move.cause is MoveCause.NOT_HELD and move.assignment in site.accepted]
    assert not lost, "an agent forgets nothing that is still waited for"
    assert not [move for move in moves if move.cause is MoveCause.STALLED], "what it holds is asked for"
    assert all(site.texts[sample] == pack_ids(text_of(sample)) for sample in site.turns)
