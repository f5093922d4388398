"""A disk that is full or takes no writes: the manager says one sentence and ends. A clock that is set changes nothing.

Once the cause is gone it goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq.asyncio

from polyrl.control import parse_endpoints
from polyrl.errors import RunFailed
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.ledger.state import LedgerState
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.testing.started import StartedProcess
from polyrl.weights import WeightsRef
from polyrl.wire import Hello, Submit, TrainerHello, pack_ids
from polyrl.wire.engine_identity import engine_keys
from polyrl_cli.local.manager import LocalManager
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.testing.fake_agent import FakeAgent
from polyrl_trainer.client import RolloutClient

EPOCH = 3
DEADLINE_S = 60.0
POLL_S = 0.02
ROOM = 1 << 20
"""Bytes that the small disk holds: a few hundred commits."""

PROMPT = pack_ids(range(20_000))
HOUR_S = 3600.0
JOB = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "trouble"},
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


class Site:
    """Where managers run one after the other, on one journal."""

    def __init__(self, root: Path, disk: Path) -> None:
        self.root, self.disk = root, disk
        write_run_keys(root / "keys")
        (root / "job.json").write_text(json.dumps(JOB))
        self.endpoints = root / "manager.json"
        self.process: StartedProcess | None = None

    async def start(self, **environment: str) -> int:
        """A manager is started; gives its pid."""
        command = [
            sys.executable,
            "-m",
            "polyrl_rollout.manager",
            "--job",
            f"{self.root}/job.json",
            "--epoch",
            str(EPOCH),
        ]
        command += ["--keys", f"{self.root}/keys/manager.key", "--endpoints", str(self.endpoints)]
        command += ["--journal", f"{self.disk}/journal.sqlite"]
        with (self.root / "log").open("wb") as log:
            self.process = StartedProcess(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        return self.process.pid

    async def listens(self, pid: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not self.endpoints.exists() or parse_endpoints(self.endpoints.read_bytes(), "").pid != pid:  # noqa: ASYNC110 - a file
                await asyncio.sleep(POLL_S)

    async def ended(self) -> tuple[int, str]:
        """Exit status, and what it said last."""
        assert self.process is not None
        status = await asyncio.to_thread(self.process.wait, DEADLINE_S)
        log = (self.root / "log").read_text()
        assert "Traceback" not in log
        return status, log.splitlines()[-1]

    async def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            if kill:
                self.process.kill()
            else:
                self.process.terminate()
            await asyncio.to_thread(self.process.wait, DEADLINE_S)

    def client(self) -> Any:
        return RolloutClient.connect(self.endpoints, self.root / "keys/trainer.key", EPOCH)

    def kept(self) -> LedgerState:
        """What the journal gives back."""
        journal = Journal(self.disk / "journal.sqlite", EPOCH)
        state, _ = journal.restore()
        journal.close()
        assert state is not None
        return state


class SmallDisk:
    """A disk of ROOM bytes, until it is made larger."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._mounted = False

    def mount(self) -> None:
        """A file system of its own; skips the test where that is not allowed."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", str(self.folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system is not allowed here")
        self._mounted = True

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.folder)], check=True)

    def unmount(self) -> None:
        if self._mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "disk")
    yield small
    small.unmount()


@asynccontextmanager
async def opened(root: Path, disk: Path) -> AsyncIterator[Site]:
    site = Site(root, disk)
    try:
        yield site
    finally:
        await site.stop(kill=True)


def group(number: int, prompt: bytes = PROMPT, n: int = 1) -> Group:
    return Group(
        number,
        0,
        purpose=Purpose.TRAIN,
        prompt_ids=prompt,
        n=n,
        sampling=SamplingParams(40),
        min_version=0,
        max_version=0,
    )


def test_after_a_commit_that_failed_there_is_none(tmp_path: Path) -> None:
    """What waits to be said would otherwise leave with the next commit, an empty one, and be believed."""
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH))
    with closing(Journal(tmp_path / "journal.sqlite", EPOCH)) as journal:
        journal.begin(ledger.state, 0.0)
        journal.append(ledger.from_trainer(TrainerHello(EPOCH, -1), 0.5).events)
        journal.commit(ledger.state, 0.5)
        (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
        journal._db.execute(f"PRAGMA max_page_count={pages}")
        journal.append(ledger.from_trainer(Submit(0, (group(0),)), 1.0).events)
        for _ in range(2):
            with pytest.raises(RunFailed, match="the journal cannot be written"):
                journal.commit(ledger.state, 1.0)


@pytest.mark.parametrize("limit", ["small disk", "file size"])
async def test_a_full_disk_ends_the_manager_and_room_brings_everything_back(
    tmp_path: Path, disk: SmallDisk, limit: str
) -> None:
    if limit == "small disk":
        disk.mount()
    async with opened(tmp_path, disk.folder) as site:
        pid = await site.start()
        await site.listens(pid)
        if limit == "file size":
            psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (ROOM, ROOM))
        async with site.client() as client:
            accepted = 0

            async def submit() -> None:
                nonlocal accepted
                for number in range(30):
                    await client.submit([group(number)])
                    accepted += 1

            submitting = asyncio.create_task(submit())
            status, sentence = await site.ended()
            assert status == 1
            assert "journal.sqlite: the journal cannot be written: " in sentence
            assert ("full" if limit == "small disk" else "disk") in sentence
            before = accepted
            assert 0 < before < 30
            if limit == "small disk":
                disk.remount(f"size={64 * ROOM}")
            assert set(range(before)) <= site.kept().groups.keys(), "what was accepted is there"
            await site.listens(await site.start())
            await asyncio.wait_for(submitting, DEADLINE_S)
            await site.stop()
        assert site.kept().counters.submitted == 30


async def test_a_journal_that_takes_no_writes_is_one_sentence(tmp_path: Path, disk: SmallDisk) -> None:
    disk.mount()
    async with opened(tmp_path, disk.folder) as site:
        await site.listens(await site.start())
        async with site.client() as client:
            await client.submit([group(0)])
        await site.stop(kill=True)
        disk.remount("ro")
        await site.start()
        status, sentence = await site.ended()
        assert status == 1
        assert "journal.sqlite: the journal cannot be written here: Read-only file system" in sentence
        disk.remount("rw")
        await site.listens(await site.start())
        await site.stop()
        assert site.kept().counters.submitted == 1


@pytest.mark.parametrize("shift_s", [HOUR_S, -HOUR_S])
async def test_a_wall_clock_that_is_set_while_the_manager_is_away_changes_nothing(
    tmp_path: Path, shift_s: float
) -> None:
    """The ledger's clock is monotonic and goes on where the journal ended; the wall clock only dates the records."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set/sitecustomize.py").write_text(
        f"import time\nhonest = time.time\ntime.time = lambda: honest() + {shift_s}\n"
    )
    async with opened(tmp_path, tmp_path) as site:
        await site.listens(await site.start())
        async with site.client() as client:
            await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b"hash"))
            await client.submit([group(number, PROMPT[:40], 4) for number in range(3)])
            await site.stop(kill=True)
            await site.listens(await site.start(PYTHONPATH=str(tmp_path / "set")))
            async with LocalManager(site.endpoints, tmp_path / "keys/operator.key", EPOCH) as control:
                await control.find()
                waits = await control.waits()
            assert waits is not None
            ages = [float(age) for age in re.findall(r"for ([0-9.-]+) s so far", " ".join(waits.waits))]
            assert ages
            assert all(0 <= age < DEADLINE_S for age in ages), "an hour has passed on the wall only"
            assert await _train(site, client, 12) == 12
            await site.stop()
    assert site.kept().counters.acknowledged == 12


async def _train(site: Site, client: RolloutClient, samples: int) -> int:
    """An agent comes, and everything is scored, taken and acknowledged."""
    context = zmq.asyncio.Context()
    keys = engine_keys(site.root / "keys", "engine")
    address = parse_endpoints(site.endpoints.read_bytes(), "").agents
    agent = FakeAgent(
        context,
        address,
        keys,
        Hello(
            EPOCH, "engine", pool=Pool.SPOT, max_running=16, kv_tokens=1 << 20, max_context=1 << 16, weight_version=-1
        ),
    )
    tasks = [asyncio.create_task(agent.run()), asyncio.create_task(_judge(client))]
    taken = 0
    try:
        while taken < samples:
            batch = await client.next(
                0, purpose=Purpose.TRAIN, min_samples=1, max_samples=99, max_tokens=10**6, deadline_s=DEADLINE_S
            )
            taken += len(batch.samples)
            await client.acknowledge(batch.number)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)
    return taken


async def _judge(client: RolloutClient) -> None:
    async for turn in client.turns():
        await client.score(turn.response.sample, turn.response.turn, 1.0)
