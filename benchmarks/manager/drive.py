"""Offers a load: fake engines that speak the real agent protocol, the real trainer client, and a check of every answer.

Engines and trainer live in this process; none of their CPU is counted. Each response is compared token by token with
what the fakes must have made, so a manager that loses or doubles one measures nothing: it fails.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Final

import zmq.asyncio
from loads import Load
from stand import EPOCH, POLL_S, Stand

from polyrl.sample import Group, Pool, Purpose, SamplingParams, Scored
from polyrl.wire import Hello, pack_ids
from polyrl.wire.engine_identity import engine_keys
from polyrl_rollout.testing.fake_agent import FakeAgent, made_tokens
from polyrl_trainer.client import RolloutClient

PROMPT_TOKENS: Final = 256
LOAD_S: Final = 900.0
BATCH_SAMPLES: Final = 64
SEED: Final = 7


class Drive:
    """One load on its way."""

    def __init__(self, load: Load, stand: Stand, client: RolloutClient, context: zmq.asyncio.Context) -> None:
        keys = stand.folder / "keys"
        hellos = [_hello(load, number) for number in range(load.engines)]
        self.agents = [
            FakeAgent(context, stand.endpoints.agents, engine_keys(keys, hello.engine), hello, load.chunk, load.pace)
            for hello in hellos
        ]
        self._load = load
        self.stand = stand
        self._client = client
        self._groups = _groups(load)
        self._budgets: dict[int, int] = {}
        """Tokens of each sample, by group in flight."""
        self._tasks = [asyncio.create_task(agent.run()) for agent in self.agents]
        self._tasks.append(asyncio.create_task(self._judge()))
        self.acknowledged = 0
        """Samples whose tokens were all right."""

    @property
    def tokens(self) -> int:
        """Sent so far."""
        return sum(agent.tokens_made for agent in self.agents)

    async def submit(self) -> float:
        """Submits everything; the seconds until every sample is with an engine."""
        began = time.monotonic()
        await self._submit(self._load.groups)
        while sum(len(agent.assigned) for agent in self.agents) < self._load.samples:
            self.stand.check()
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began

    async def take(self) -> None:
        """Takes batches until all samples are acknowledged; an endless load gets new groups for old ones."""
        while self._load.endless or self.acknowledged < self._load.samples:
            batch = await self._client.next(
                0,
                purpose=Purpose.TRAIN,
                min_samples=1,
                max_samples=BATCH_SAMPLES,
                max_tokens=10**9,
                deadline_s=LOAD_S,
            )
            for scored in batch.samples:
                _check(scored, self._budgets[scored.group])
            await self._client.acknowledge(batch.number)
            self.acknowledged += len(batch.samples)
            if self._load.endless:
                await self._submit(len(batch.samples) // self._load.n)

    async def end(self) -> None:
        """Stops engines and trainer."""
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def _submit(self, count: int) -> None:
        groups = [next(self._groups) for _ in range(count)]
        self._budgets |= {group.id: group.sampling.max_new_tokens for group in groups}
        await self._client.submit(groups)

    async def _judge(self) -> None:
        """Each on its own, as a trainer's rewards are: the next does not wait for the disk under the last."""
        async with asyncio.TaskGroup() as judging:
            async for turn in self._client.turns():
                judging.create_task(self._client.score(turn.response.sample, turn.response.turn, 1.0))


def connected(stand: Stand) -> RolloutClient:
    """The trainer's connection, a context manager."""
    return RolloutClient.connect(stand.endpoints.trainer, stand.folder / "keys/trainer.key", EPOCH)


def _check(scored: Scored, budget: int) -> None:
    response = scored.response
    if len(response.ids) != 4 * budget:
        raise SystemExit(f"sample {response.sample} has {len(response.ids) // 4} tokens, its engine made {budget}")
    if response.ids != made_tokens(response.sample, 0, len(response.ids) // 4).tobytes():
        raise SystemExit(f"sample {response.sample} came back with other tokens than its engines made")


def _groups(load: Load) -> Iterator[Group]:
    prompt, draw, number = pack_ids(range(PROMPT_TOKENS)), random.Random(SEED), 0
    while True:
        budget = draw.randint(load.shortest, load.tokens) if load.shortest else load.tokens
        yield Group(
            number,
            0,
            purpose=Purpose.TRAIN,
            prompt_ids=prompt,
            n=load.n,
            sampling=SamplingParams(budget),
            min_version=0,
            max_version=0,
        )
        number += 1


def _hello(load: Load, number: int) -> Hello:
    room = -(-load.samples // load.engines)
    limit = PROMPT_TOKENS + load.tokens
    return Hello(
        EPOCH,
        f"fake-{number}",
        pool=Pool.SPOT,
        max_running=room,
        kv_tokens=2 * room * limit,
        max_context=limit,
        weight_version=-1,
    )
