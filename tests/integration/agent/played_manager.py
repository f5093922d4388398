"""A manager that a test plays, and an agent in conversation with it over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import zmq
import zmq.asyncio

from polyrl.keys import AgentKeys, TrainerKeys, format_keys
from polyrl.sample import Pool, SamplingParams
from polyrl.wire import (
    FINISH_CODES,
    ROW_DTYPE,
    Announce,
    Assign,
    Cancel,
    Deltas,
    EngineCapacity,
    FromAgent,
    Hello,
    Resend,
    ToAgent,
    TokensKept,
    WeightsLoaded,
    Welcome,
    check_deltas,
    decode_from_agent,
    encode,
    pack_ids,
    unpack_ids,
)
from polyrl_rollout.agent.app import Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.testing.fake_engine import FakeEngine, continuation
from polyrl_rollout.weights.staging import Staging
from polyrl_trainer.weights.publisher import WeightPublisher

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
        self.lease_s = 3.0
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
        await self.send(Welcome(1, self.lease_s, beat_s=0.1, delta_s=0.02))

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

    def __init__(self, folder: Path, *, tries_idle: bool = False) -> None:
        self.manager_keys, agent, trainer = pair(), pair(), pair()
        self.trainer_file = folder / "trainer.key"
        self.trainer_file.touch(mode=0o600)
        self.trainer_file.write_text(format_keys(TrainerKeys(*trainer, self.manager_keys[0], agent[0])))
        self.manager = PlayedManager(self.manager_keys)
        self.publisher = WeightPublisher(self.trainer_file)
        self.engine = FakeEngine(EngineCapacity(max_running=16, kv_tokens=4096, max_context=1024))
        keys = AgentKeys(*agent, self.manager_keys[0], trainer[0])
        self.settings = settings = AgentSettings(
            lambda: self.manager.endpoint,
            keys,
            run_epoch=1,
            engine=ENGINE,
            pool=Pool.SPOT,
            drain_s=4.0,
            seed=0,
            tries_idle=tries_idle,
        )
        self.staging = Staging("run", ENGINE, folder)
        self.model_config = b"{}"
        """Of all versions; with this one an engine cannot be tried."""
        self.agent = Agent(settings, self.engine, EngineCapacity(32, 1 << 16, max_context=512), self.staging)
        self.task = asyncio.create_task(self.agent.run())

    def announcement(self, version: int) -> Announce:
        published = self.publisher.publish(
            version, {"w": torch.full((7,), float(version))}.items(), {"config.json": self.model_config}
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

    async def close_agent(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def close(self) -> None:
        await self.close_agent()
        await self.manager.close()
        self.publisher.close()
        self.staging.close()


def undisturbed(number: int, budget: int) -> list[int]:
    return continuation([*PROMPT, number], budget)
