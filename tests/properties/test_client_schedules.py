"""Random schedules of the client's protocol: the real client and the real ledger, with everything between them going
wrong. Frames are lost with their connection, requests are cancelled, trainers are replaced and go on as zombies,
batches are acknowledged in any order, two steps are open. Each group is trained once at most, each acknowledged batch
counted once, nothing is lost, and no step is called empty while the trainer does not know why."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from polyrl import wire
from polyrl.errors import Superseded
from polyrl.keys import TrainerKeys
from polyrl.ledger import events
from polyrl.sample import DiscardReason, Group, Purpose, SamplingParams
from polyrl.wire import pack_ids
from polyrl.wire.ranges import Ranges
from polyrl_rollout.manager.peers.sessions import TrainerSession
from polyrl_rollout.testing.stage import Stage
from polyrl_trainer.client.client import RolloutClient

SCHEDULES = 60
STEPS, GROUPS, SAMPLES = 4, 5, 2
MAX_MOVES = 20_000
"""Of one schedule; the longest takes a tenth of them."""
KEYS = TrainerKeys("p" * 40, "s" * 40, manager_public_key="m" * 40, agent_public_key="a" * 40)


@dataclass
class Book:
    """What the trainer's state holds: a checkpoint after every line."""

    step: int = 0
    next_group: int = 0
    open: dict[int, set[int]] = field(default_factory=lambda: {step: set() for step in range(STEPS)})
    learning: dict[int, set[int]] = field(default_factory=lambda: {step: set() for step in range(STEPS)})
    trained: dict[int, set[int]] = field(default_factory=lambda: {step: set() for step in range(STEPS)})
    batches: Ranges = field(default_factory=list)

    def taken(self, step: int) -> int:
        return len(self.learning[step] | self.trained[step])

    def drop(self, client: RolloutClient) -> None:
        for dropped in client.take_dropped():
            self.open[dropped.step].discard(dropped.group)


class Connection:
    """Stands for the client's link: what is on the way is lost when it breaks."""

    def __init__(self, site: Site, identity: bytes) -> None:
        self.site, self.identity = site, identity
        self.out: deque[bytes] = deque()
        self.back: deque[bytes] = deque()
        self.up = False
        self.client: RolloutClient

    def send(self, message: wire.FromTrainer) -> None:
        if self.up:
            self.out.append(wire.encode(message))

    def dial(self) -> None:
        self.out.clear()
        self.back.clear()
        self.up = False
        self.out.append(wire.encode(self.client._hello()))

    def move(self, *, outwards: bool) -> None:
        if outwards and self.out:
            self.site.session.on_frame(self.identity, self.out.popleft())
        elif not outwards and self.back:
            self._take(wire.decode_to_trainer(self.back.popleft()))

    def _take(self, message: wire.ToTrainer) -> None:
        if isinstance(message, wire.TrainerWelcome):
            self.up = True
            self.client._on_welcome(message)
        elif isinstance(message, wire.Fenced) and message.reason == wire.SUPERSEDED:
            error = Superseded(message.reason)
            self.client._requests.fail(error)
            self.client._turns.end(error)
        elif isinstance(message, wire.Fenced):
            self.dial()
        else:
            self.client._handle(message)


class Site:
    """One manager, and every trainer that ever was."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.stage = Stage()
        self.stage.takes_notices = False
        self.stage.engine("a", max_running=16)
        self.connections: list[Connection] = []
        self.pulls: list[asyncio.Task[Any]] = []
        self.session = TrainerSession(
            SimpleNamespace(send=self._route, traffic=SimpleNamespace(dropped=Counter())),  # type: ignore[arg-type]
            lambda message: self.stage.trainer(message).to_trainer,
            lambda report: None,
        )
        self.saved = self.book = Book()
        self.processes: list[asyncio.Task[None]] = []

    def _route(self, identity: bytes, frame: bytes) -> None:
        self.connections[int(identity)].back.append(frame)

    def begin(self) -> None:
        """Another trainer, from the book as it is."""
        client = RolloutClient("tcp://nowhere", KEYS, 1, list(self.saved.batches), 60.0, covers=True)
        client._link._context.destroy()
        link = Connection(self, str(len(self.connections)).encode())
        self.connections.append(link)
        link.client, client._link = client, link  # type: ignore[assignment]
        client._requests._send = client._texts._send = link.send
        link.dial()
        self.book = deepcopy(self.saved)
        for step in range(STEPS):
            self.book.open[step] |= self.book.learning[step]
            self.book.learning[step].clear()
        self.processes.append(asyncio.create_task(self._train(client, self.book)))

    async def _train(self, client: RolloutClient, book: Book) -> None:
        judge = asyncio.create_task(self._judge(client))
        acknowledging: list[asyncio.Task[None]] = []
        try:
            await self._adopt(client, book)
            while book.step < STEPS:
                await self._step(client, book, acknowledging)
                if self.rng.random() < 0.3:
                    self._save(client, book)
            await asyncio.gather(*acknowledging)
            self._save(client, book)
            while client._requests._posted:  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0)
        finally:
            for task in (judge, *acknowledging):
                task.cancel()
            await asyncio.gather(judge, *acknowledging, return_exceptions=True)

    def _save(self, client: RolloutClient, book: Book) -> None:
        """A checkpoint; a successor goes on from the newest."""
        if book is self.book:
            book.batches = list(client.acknowledged)
            self.saved = deepcopy(book)
            client.cover(book.batches)

    async def _adopt(self, client: RolloutClient, book: Book) -> None:
        welcome = await client._first_welcome
        book.next_group = max(book.next_group, welcome.next_group)
        ours = set[int]().union(*book.open.values())
        held = {one.id for one in welcome.held}
        for groups in book.open.values():
            groups &= held
        for number in held - ours:
            await client.reject(f"{number}.0", DiscardReason.STALE, "not ours")

    async def _step(self, client: RolloutClient, book: Book, acknowledging: list[asyncio.Task[None]]) -> None:
        for step in range(book.step, min(book.step + 2, STEPS)):
            missing = GROUPS - book.taken(step) - len(book.open[step])
            new = range(book.next_group, book.next_group + missing)
            book.next_group += len(new)
            book.open[step] |= set(new)
            if new:
                await client.submit([group(number, step) for number in sorted(book.open[step])])
        if book.taken(book.step) < GROUPS:
            await self._pull(client, book, acknowledging)
        book.drop(client)
        await asyncio.sleep(0)
        if len(book.trained[book.step]) >= GROUPS:
            await client.end_step(book.step, Purpose.TRAIN)
            book.step += 1

    async def _pull(self, client: RolloutClient, book: Book, acknowledging: list[asyncio.Task[None]]) -> None:
        step = book.step
        most = SAMPLES * (GROUPS - book.taken(step))
        least = self.rng.randint(1, most)
        limits = {"min_samples": least, "max_samples": most, "max_tokens": 10**6, "deadline_s": 10**6}
        pull = asyncio.create_task(client.next(step, purpose=Purpose.TRAIN, **limits))  # type: ignore[arg-type]
        self.pulls.append(pull)
        await asyncio.wait([pull])
        if pull.cancelled():
            return
        batch = pull.result()
        if book is not self.book:
            return  # a zombie's state is nobody's
        if batch.last and not batch.samples:
            book.drop(client)
            assert not book.open[step], "called the last without a word about what was dropped"
        groups = {scored.group for scored in batch.samples}
        book.open[step] -= groups
        book.learning[step] |= groups
        if groups:
            acknowledging.append(asyncio.create_task(self._learn(client, book, batch, groups)))

    async def _learn(self, client: RolloutClient, book: Book, batch: wire.Batch, groups: set[int]) -> None:
        """Batches become part of the state in any order."""
        for _ in range(self.rng.choice((0, 5, 200))):
            await asyncio.sleep(0)
        if book is self.book:
            book.learning[batch.step] -= groups
            book.trained[batch.step] |= groups
            await client.acknowledge(batch.number)

    async def _judge(self, client: RolloutClient) -> None:
        async for turn in client.turns():
            if self.rng.random() < 0.1:
                await client.reject(turn.response.sample, DiscardReason.REWARD_RAISED, "no")
            else:
                await client.score(turn.response.sample, turn.response.turn, 1.0)

    async def run(self) -> None:
        self.begin()
        for _ in range(MAX_MOVES):
            if self.processes[-1].done():
                break
            self._move()
            for _ in range(self.rng.randint(1, 4)):
                await asyncio.sleep(0)
        assert self.processes[-1].done(), f"nobody gets on: {self.book}"
        for process in self.processes[:-1]:
            process.cancel()
        ends = await asyncio.gather(*self.processes, return_exceptions=True)
        assert ends[-1] is None, ends[-1]
        assert all(end is None or isinstance(end, Superseded | asyncio.CancelledError) for end in ends[:-1]), ends

    def _move(self) -> None:
        luck, link = self.rng.random(), self.rng.choice(self.connections[-2:])
        if luck < 0.75:
            link.move(outwards=self.rng.random() < 0.5)
        elif luck < 0.95:
            self._generate()
        elif luck < 0.975:
            link.dial()
        elif luck < 0.99 and self.pulls:
            self.pulls.pop().cancel()
        elif luck > 0.997 and len(self.connections) < 6 and self.connections[-1].up:
            self.begin()

    def _generate(self) -> None:
        assignments = self.stage.ledger.state.assignments
        if assignments:
            outcome = self.stage.tokens("a", self.rng.choice(list(assignments)), [5, 2], "stop")
        else:
            self.stage.tokens("a", 0, [])
            outcome = self.stage.pass_time(0.05)
        self.session.send(outcome.to_trainer)


def group(number: int, step: int) -> Group:
    versions = {"min_version": 0, "max_version": 0}
    return Group(number, step, Purpose.TRAIN, pack_ids([7, number]), SAMPLES, SamplingParams(8), **versions)


@pytest.mark.parametrize("first", range(0, SCHEDULES, 10))
async def test_whatever_happens_between_them_each_group_is_trained_once(first: int) -> None:
    for seed in range(first, first + 10):
        site = Site(seed)
        await site.run()
        state, book = site.stage.ledger.state, site.book
        assert [len(groups) for groups in book.trained.values()] == [GROUPS] * STEPS, seed
        acknowledged = Counter(e.batch for e in site.stage.events if isinstance(e, events.BatchAcknowledged))
        assert set(acknowledged.values()) == {1}, seed
        assert state.counters.acknowledged == STEPS * GROUPS * SAMPLES, seed
        assert not state.samples, seed
        assert not state.batches, seed
        assert state.counters.submitted == state.counters.acknowledged + sum(state.counters.discarded.values()), seed
