"""The manager's process is killed under real agents and a real trainer's client; a trainer is replaced by another."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import polyrl
import polyrl_rollout
from polyrl.control import Endpoints, parse_endpoints
from polyrl.errors import DeadlineExceeded, InvalidData
from polyrl.keys import AgentKeys, read_keys
from polyrl.ledger.journal import JOURNAL_SCHEMA
from polyrl.parent_death_signal import PARENT_PID
from polyrl.sample import DiscardReason, Finish, Group, Pool, Purpose, SamplingParams, Scored
from polyrl.status import ManagerStatus
from polyrl.testing.started import StartedProcess
from polyrl.wire import WIRE_VERSION, EngineCapacity, GroupDropped, pack_ids, unpack_ids
from polyrl.wire.engine_identity import engine_keys
from polyrl_cli.inspection.check import audit_journal
from polyrl_cli.local.manager import LocalManager
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.agent.__main__ import read_endpoint
from polyrl_rollout.agent.app import Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.engines.port import GenerateRequest, TokenChunk
from polyrl_rollout.manager.__main__ import write_endpoints
from polyrl_rollout.testing.fake_engine import LOGPROB, FakeEngine, continuation
from polyrl_rollout.weights.staging import Staging
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.client.link import FENCED_AGAIN_S
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import EOS_ID, CharacterTokenizer
from polyrl_trainer.environments import CalculatorEnvironment
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.generation.supply import AdoptedGroups
from polyrl_trainer.user_code.episodes import Episodes
from polyrl_trainer.user_code.rewards import Failures
from polyrl_trainer.user_code.verdicts import Reward
from polyrl_trainer.user_code.workers.conversations import LocalConversations
from polyrl_trainer.weights.publisher import WeightPublisher

EPOCH = 3
DEADLINE_S = 90.0
POLL_S = 0.02
GROUPS, N, TOKENS = 6, 4, 300
SPEED = 60.0
"""Tokens per second of a sequence: five seconds each, so that a kill falls into the middle."""
LEASE_S = 15.0
"""Of the manager, in the place of its 3 s: the agents are in this process here, and one that is starved is not lost."""
MANAGER = f"""
import typer
from polyrl.ledger import LedgerConfig
from polyrl_rollout.manager import __main__ as manager
manager.LedgerConfig = lambda **chosen: LedgerConfig(**chosen | dict(lease_s={LEASE_S}))
typer.run(manager.main)
"""
CALLS = 3
TOKENIZER = CharacterTokenizer("0123456789=<>/+acelrstu")
JOB = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "restarts"},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {"path": "model"},
            "data": {"rl": [{"path": "prompts.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": 1},
        }
    },
}


class CountingEngine(FakeEngine):
    """Counts every token it gives."""

    made = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        async for chunk in super().generate(request):
            self.made += len(chunk.ids)
            yield chunk


class CalculatingEngine(CountingEngine):
    """Calls the calculator with what it said last, CALLS times, one after the other; then it is done."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        results = TOKENIZER.decode(request.input_ids).split("<result>")[1:]
        last = results[-1].split("<")[0] if results else "1"
        text = f"<calc>{last}+1</calc>" if len(results) < CALLS else "7"
        new = [*TOKENIZER.encode_text(text), EOS_ID]
        self.made += len(new)
        yield TokenChunk(new, [LOGPROB] * len(new), version=self.version, finish=Finish.STOP)


class World:
    """A manager that can be killed; agents, publisher and watcher that outlive it."""

    def __init__(self, root: Path, engine: type[CountingEngine] = CountingEngine) -> None:
        self.root = root
        write_run_keys(root / "keys")
        (root / "job.json").write_text(json.dumps(JOB))
        self.file = root / "manager.json"
        self.engines = [engine(EngineCapacity(16, 1 << 16, max_context=4096), SPEED) for _ in range(2)]
        self.status = ManagerStatus(seq=-1, run_epoch=EPOCH)
        self.code = ""
        """Where the next manager's code lies; empty: here."""
        self._manager: StartedProcess | None = None

    @property
    def made(self) -> int:
        """Tokens that engines gave."""
        return sum(engine.made for engine in self.engines)

    async def start_manager(self) -> None:
        (self.root / "manager.py").write_text(MANAGER)
        command = [sys.executable, "-m", "polyrl.testing.script", str(self.root / "manager.py")]
        command += ["--job", str(self.root / "job.json"), "--epoch", str(EPOCH)]
        command += ["--keys", str(self.root / "keys/manager.key"), "--endpoints", str(self.file)]
        command += ["--journal", str(self.root / "journal.sqlite")]
        with (self.root / "log").open("ab") as log:
            environment = {**os.environ, PARENT_PID: str(os.getpid())}
            if self.code:
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, (self.code, environment.get("PYTHONPATH"))))
            self._manager = StartedProcess(command, env=environment, stdout=log, stderr=log)
        pid = self._manager.pid
        await self.until(lambda: self.file.exists() and parse_endpoints(self.file.read_bytes(), "").pid == pid)

    async def kill_manager(self) -> None:
        assert self._manager is not None
        self._manager.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._manager.wait)

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110 - any condition
                await asyncio.sleep(POLL_S)

    async def run_agent(self, number: int) -> int:
        name, engine = f"engine-{number}", self.engines[number]
        settings = AgentSettings(
            lambda: read_endpoint(self.file, EPOCH),
            engine_keys(self.root / "keys", name),
            run_epoch=EPOCH,
            engine=name,
            pool=Pool.SPOT,
            drain_s=2.0,
            seed=0,
        )
        staging = Staging("manager-restarts", name)
        try:
            return await Agent(settings, engine, engine.capacity, staging).run()
        finally:
            staging.close()

    async def watch(self) -> None:
        async with LocalManager(self.file, self.root / "keys/operator.key", EPOCH) as control:
            await control.find()
            async for status in control.watch():
                self.status = status

    def client(self, **options: Any) -> Any:
        return RolloutClient.connect(self.file, self.root / "keys/trainer.key", EPOCH, **options)


async def publish(client: RolloutClient, publisher: WeightPublisher) -> None:
    tensors = {"w": torch.zeros(8)}
    published = await asyncio.to_thread(publisher.publish, 0, tensors.items(), {"config.json": b"{}"})
    await client.publish(published)


@asynccontextmanager
async def at_work(root: Path, engine: type[CountingEngine] = CountingEngine) -> AsyncIterator[World]:
    """Manager, two agents, and somebody who follows the status."""
    world = World(root, engine)
    await world.start_manager()
    tasks = [asyncio.create_task(world.run_agent(number)) for number in range(2)]
    tasks.append(asyncio.create_task(world.watch()))
    try:
        yield world
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.kill_manager()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with at_work(tmp_path) as opened:
        yield opened


@pytest.fixture
def publisher(world: World) -> Any:
    made = WeightPublisher(world.root / "keys/trainer.key", run_epoch=EPOCH)
    yield made
    made.close()


def prompt(number: int) -> list[int]:
    return [7, 7, number]


def group(number: int, of: int | None = None, max_new_tokens: int = TOKENS) -> Group:
    """`of`: whose prompt it has; by default its own."""
    ids = pack_ids(prompt(number if of is None else of))
    return Group(
        number,
        0,
        purpose=Purpose.TRAIN,
        prompt_ids=ids,
        n=N,
        sampling=SamplingParams(max_new_tokens),
        min_version=0,
        max_version=0,
    )


async def judge(client: RolloutClient) -> None:
    async for turn in client.turns():
        await client.score(turn.response.sample, turn.response.turn, 1.0)


async def take(client: RolloutClient, samples: int) -> list[Scored]:
    """So many samples, acknowledged batch by batch."""
    taken: list[Scored] = []
    while len(taken) < samples:
        batch = await client.next(
            0, purpose=Purpose.TRAIN, min_samples=1, max_samples=999, max_tokens=10**6, deadline_s=DEADLINE_S
        )
        taken += batch.samples
        await client.acknowledge(batch.number)
        if not batch.samples:
            await asyncio.sleep(POLL_S)
    return taken


def is_exact(scored: Scored, of: int) -> bool:
    return unpack_ids(scored.response.ids).tolist() == continuation(prompt(of), TOKENS)


def is_sound(journal: Path) -> bool:
    broken = [verdict.first for verdict in audit_journal(journal) if verdict.broken]
    assert broken == []
    return True


@pytest.mark.parametrize(("run_epoch", "found"), [(EPOCH, True), (EPOCH - 1, False), (EPOCH + 1, False)])
def test_the_endpoints_of_another_epochs_manager_are_no_address(tmp_path: Path, run_epoch: int, found: bool) -> None:
    write_run_keys(tmp_path / "keys")
    keys = read_keys(AgentKeys, tmp_path / "keys/agent.key")
    ends = Endpoints(
        "tcp://127.0.0.1:1",
        "tcp://127.0.0.1:2",
        http="http://127.0.0.1:3",
        pid=1,
        run_epoch=run_epoch,
        public_key=keys.manager_public_key,
    )
    write_endpoints(ends, tmp_path / "manager.json")
    assert (read_endpoint(tmp_path / "manager.json", EPOCH) is not None) is found


async def test_when_only_the_manager_dies_no_token_is_generated_twice(world: World, publisher: WeightPublisher) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    moments = random.Random(seed)
    async with world.client() as client:
        judging = asyncio.create_task(judge(client))
        await publish(client, publisher)
        await client.submit([group(number) for number in range(GROUPS)])
        taking = asyncio.create_task(take(client, GROUPS * N))
        for share in (0.2, 0.6):
            goal = GROUPS * N * TOKENS * moments.uniform(share, share + 0.3)
            await world.until(lambda: world.made >= goal)  # noqa: B023 - asked at once
            await world.kill_manager()
            await world.start_manager()
        taken = await asyncio.wait_for(taking, DEADLINE_S)
        await world.until(lambda: world.status.samples.acknowledged == GROUPS * N)
        judging.cancel()
    assert sorted((one.group, one.index) for one in taken) == [(g, i) for g in range(GROUPS) for i in range(N)]
    assert all(is_exact(one, one.group) for one in taken)
    assert world.made == GROUPS * N * TOKENS
    tokens = world.status.tokens
    assert (tokens.generated, tokens.kept, tokens.regenerated) == (world.made, world.made, 0)
    assert world.status.engines_lost == 0
    assert is_sound(world.root / "journal.sqlite")


def copy_of_code(folder: Path) -> None:
    for package in (polyrl, polyrl_rollout):
        here = Path(package.__file__).parent
        shutil.copytree(here, folder / here.name, ignore=shutil.ignore_patterns("__pycache__"))


def next_version(folder: Path) -> str:
    """This code with another schema, in which an event has another name; gives its PYTHONPATH."""
    copy_of_code(folder)
    for path in (folder / "polyrl/ledger").rglob("*.py"):
        path.write_text(path.read_text().replace("SampleScored", "SampleRated"))
    schema = folder / "polyrl/ledger/journal/__init__.py"
    number = f"JOURNAL_SCHEMA: Final = {JOURNAL_SCHEMA}"
    assert number in schema.read_text()
    schema.write_text(schema.read_text().replace(number, f"JOURNAL_SCHEMA: Final = {JOURNAL_SCHEMA + 1}"))
    with (folder / "polyrl/ledger/journal/migration.py").open("a") as steps:
        steps.write(f"""
def _renamed(event):
    return ["SampleRated", *event[1:]] if event[0] == "SampleScored" else event

STEPS[{JOURNAL_SCHEMA}] = Step("an event has another name", event=_renamed)
""")
    return str(folder)


async def test_a_manager_of_the_next_version_takes_over_a_live_run(
    world: World, publisher: WeightPublisher, tmp_path: Path
) -> None:
    """Agents and trainer stay as they are; no token is generated twice. What the old one reads is then refused."""
    async with world.client() as client:
        judging = asyncio.create_task(judge(client))
        await publish(client, publisher)
        await client.submit([group(number) for number in range(GROUPS)])
        await client.submit([group(GROUPS, max_new_tokens=5)])
        short = await asyncio.wait_for(take(client, N), DEADLINE_S)
        await world.kill_manager()
        world.code = next_version(tmp_path / "next")
        await world.start_manager()
        taken = await asyncio.wait_for(take(client, GROUPS * N), DEADLINE_S)
        await world.until(lambda: world.status.samples.acknowledged == (GROUPS + 1) * N)
        judging.cancel()
    assert {one.group for one in short} == {GROUPS}
    assert all(is_exact(one, one.group) for one in taken)
    assert world.made == GROUPS * N * TOKENS + N * 5
    assert world.status.tokens.regenerated == 0
    with pytest.raises(InvalidData, match=f"of journal schema {JOURNAL_SCHEMA + 1}, this version reads"):
        audit_journal(world.root / "journal.sqlite")


async def test_a_manager_of_another_wire_version_is_named_by_the_trainer_that_it_refuses(
    world: World, publisher: WeightPublisher, tmp_path: Path
) -> None:
    """It was awaited in silence until the deadline, which named no version."""
    code = tmp_path / "next"
    copy_of_code(code)
    wire = code / "polyrl/wire/__init__.py"
    number = f"WIRE_VERSION: Final = {WIRE_VERSION}"
    assert number in wire.read_text()
    wire.write_text(wire.read_text().replace(number, f"WIRE_VERSION: Final = {WIRE_VERSION + 1}"))
    sentence = f"speaks wire version {WIRE_VERSION}, the manager {WIRE_VERSION + 1}"
    async with world.client(max_manager_outage_s=FENCED_AGAIN_S + 10.0) as client:
        await publish(client, publisher)
        gone_at = time.monotonic()  # a crowded machine may need most of the outage until the other one is there
        await world.kill_manager()
        world.code = str(code)
        await world.start_manager()
        with pytest.raises(DeadlineExceeded, match=sentence):
            await take(client, 1)
    assert time.monotonic() - gone_at > FENCED_AGAIN_S, "a manager of this version may come back"
    with pytest.raises(DeadlineExceeded, match=sentence):
        async with world.client():
            pass
    log = (world.root / "log").read_text()
    assert sentence in log
    assert log.count("of another version") < 10, "a line for each greeting would fill the log"


async def test_a_lost_journal_costs_what_was_open_and_nothing_else(world: World, publisher: WeightPublisher) -> None:
    async with world.client() as client:
        judging = asyncio.create_task(judge(client))
        await publish(client, publisher)
        await client.submit([group(number) for number in range(GROUPS)])
        first = await client.next(
            0, purpose=Purpose.TRAIN, min_samples=1, max_samples=N, max_tokens=10**6, deadline_s=DEADLINE_S
        )
        done = first.samples[0].group
        await world.kill_manager()
        for part in world.root.glob("journal.sqlite*"):
            part.unlink()
        await world.start_manager()
        await client.acknowledge(first.number)
        lost: list[GroupDropped] = []
        await world.until(lambda: lost.extend(client.take_dropped()) or len(lost) == GROUPS - 1)
        assert {drop.reason for drop in lost} == {DiscardReason.JOURNAL_LOST}
        assert sorted(drop.group for drop in lost) == [number for number in range(GROUPS) if number != done]
        await client.submit([group(GROUPS + drop.group, of=drop.group) for drop in lost])
        taken = await asyncio.wait_for(take(client, (GROUPS - 1) * N), DEADLINE_S)
        await world.until(lambda: world.status.samples.acknowledged == (GROUPS - 1) * N)
        judging.cancel()
    assert all(is_exact(one, one.group % GROUPS) for one in [*first.samples, *taken])
    assert sorted({one.group for one in taken}) == sorted(GROUPS + drop.group for drop in lost)
    assert world.status.weight_version == 0
    assert is_sound(world.root / "journal.sqlite")


async def test_another_trainer_takes_what_the_first_one_left_and_nothing_is_generated_twice(
    world: World, publisher: WeightPublisher
) -> None:
    async with world.client() as first:
        judging = asyncio.create_task(judge(first))
        await publish(first, publisher)
        await first.submit([group(number) for number in range(GROUPS)])
        one = {"purpose": Purpose.TRAIN, "min_samples": 1, "max_samples": N, "max_tokens": 10**6}
        packed = await first.next(0, **one, deadline_s=DEADLINE_S)
        asking = asyncio.create_task(first.next(0, purpose=Purpose.TRAIN, min_samples=999, max_samples=999,
                                                max_tokens=10**6, deadline_s=DEADLINE_S))  # fmt: skip
        await asyncio.sleep(POLL_S)
        judging.cancel()
        asking.cancel()
    async with world.client() as second:
        held = AdoptedGroups(second.welcome.held)
        assert second.welcome.next_group == GROUPS
        assert [held.take(group(99, of=number)) for number in range(GROUPS)] == list(range(GROUPS))
        judging = asyncio.create_task(judge(second))
        taken = await asyncio.wait_for(take(second, GROUPS * N), DEADLINE_S)
        await world.until(lambda: world.status.samples.acknowledged == GROUPS * N)
        judging.cancel()
    assert packed.samples[0].group in {one.group for one in taken}
    assert all(is_exact(one, one.group) for one in taken)
    assert world.made == GROUPS * N * TOKENS
    assert is_sound(world.root / "journal.sqlite")


class Calculator(CalculatorEnvironment):
    """Hangs where a test wants it, and may write something else than a calculator would."""

    def __init__(self, until: int = CALLS + 1, wrong: int = -1) -> None:
        """Hangs before text number `until`; text number `wrong` is wrong."""
        self.hanging: set[str] = set()
        self._until, self._wrong = until, wrong

    async def run(self, sample: Any, generate: Any) -> None:
        written = 0

        async def write(text: str) -> Any:
            nonlocal written
            if written == self._until:
                self.hanging.add(sample.id)
                await asyncio.Event().wait()
            written += 1
            return await generate("<result>0</result>" if written - 1 == self._wrong else text)

        await super().run(sample, write)


class OneForAll:
    failures = Failures({}, {})

    async def score(self, sample: Any, n: int) -> Reward:
        return Reward(1.0)

    def forget(self, group: int) -> None:
        pass


@asynccontextmanager
async def a_loop_host(client: RolloutClient, calculator: Calculator) -> AsyncIterator[None]:
    """Plays with `calculator` for as long as the context lasts; ends without a word to anyone."""
    episodes = Episodes(LocalConversations(calculator, DEADLINE_S), CALLS + 2, tokenizer=TOKENIZER)
    host = UserCodeRunner(client, TOKENIZER, reward=OneForAll(), episodes=episodes)  # type: ignore[arg-type]
    for number in range(GROUPS):
        host.register(number, Prompt("f:0", "1=", ids=tuple(TOKENIZER.encode_prompt("1=")), metadata={}), N)
    running = asyncio.create_task(host.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        host.release(range(GROUPS))


def calculation(number: int) -> Group:
    sampling = SamplingParams(TOKENS, stop_token_ids=(EOS_ID,))
    return Group(
        number,
        0,
        purpose=Purpose.TRAIN,
        prompt_ids=pack_ids(TOKENIZER.encode_prompt("1=")),
        n=N,
        sampling=sampling,
        min_version=0,
        max_version=0,
    )


EPISODE = "<calc>1+1</calc><result>2</result><calc>2+1</calc><result>3</result><calc>3+1</calc><result>4</result>7"


@asynccontextmanager
async def in_their_third_turn(root: Path) -> AsyncIterator[tuple[World, list[Group]]]:
    """A world whose trainer is gone while every sample's environment was about to write its third text."""
    async with at_work(root, CalculatingEngine) as world:
        publisher, groups = (
            WeightPublisher(root / "keys/trainer.key", run_epoch=EPOCH),
            [calculation(n) for n in range(GROUPS)],
        )
        try:
            async with world.client() as client, a_loop_host(client, stuck := Calculator(until=2)):
                await publish(client, publisher)
                await client.submit(groups)
                await world.until(lambda: len(stuck.hanging) == GROUPS * N)
            yield world, groups
        finally:
            publisher.close()


async def test_another_trainers_environments_go_on_where_the_first_ones_were(tmp_path: Path) -> None:
    async with in_their_third_turn(tmp_path) as (world, groups):
        async with world.client() as second:
            held = AdoptedGroups(second.welcome.held)
            assert sorted(held.take(group) for group in groups) == list(range(GROUPS))
            async with a_loop_host(second, Calculator()):
                taken = await asyncio.wait_for(take(second, GROUPS * N), DEADLINE_S)
            await world.until(lambda: world.status.samples.acknowledged == GROUPS * N)
        assert {TOKENIZER.decode(unpack_ids(one.response.ids).tolist()) for one in taken} == {EPISODE}
        assert world.made == sum(sum(one.response.loss_mask) for one in taken)
    assert is_sound(tmp_path / "journal.sqlite")


async def test_environments_that_do_not_repeat_themselves_cost_their_groups(tmp_path: Path) -> None:
    async with in_their_third_turn(tmp_path) as (world, _):
        async with world.client() as second, a_loop_host(second, Calculator(wrong=1)):
            notices = aiter(second.dropped())
            dropped = [await asyncio.wait_for(anext(notices), DEADLINE_S) for _ in range(GROUPS)]
        assert {one.reason for one in dropped} == {DiscardReason.ENVIRONMENT_DIVERGED}
        expected = (
            "replayed in another process, the environment wrote '<result>0</result>' after turn 1, and '<result>3<"
        )
        assert all(one.detail.startswith(expected) for one in dropped)
    assert is_sound(tmp_path / "journal.sqlite")
