"""The trainer's client: every call ends, a lost manager is bridged, what it says unasked comes once."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from polyrl.errors import DeadlineExceeded, InvalidData, RunFailed, Superseded
from polyrl.keys import ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.sample import DiscardReason, Purpose
from polyrl.testing.started import ran
from polyrl.weights import WeightsRef
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.manager.__main__ import write_endpoints
from polyrl_rollout.manager.server import Listen, Manager
from polyrl_trainer.client import RequestRefused, RolloutClient

EPOCH = 3
DEADLINE_S = 20.0
LEARNER_DEADLINE_S = 280.0
"""Of two processes that start and fifteen steps: half a minute on two idle cores."""
ANY = {"purpose": Purpose.TRAIN, "min_samples": 1, "max_samples": 16, "max_tokens": 10**6}


async def test_a_late_batch_raises_with_the_chain_of_waits(site: Any) -> None:
    async with site.client() as client:
        await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b""))
        await client.submit([site.group(0)])
        with pytest.raises(DeadlineExceeded, match=r"a batch of step 0 .* from the rollouts .*4 samples wait for an"):
            await client.next(0, **ANY, deadline_s=0.3)


async def test_without_a_manager_connecting_ends_at_its_deadline(tmp_path: Path) -> None:
    write_run_keys(tmp_path / "keys")
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="a welcome from the manager"):
        async with RolloutClient.connect(
            tmp_path / "manager.json", tmp_path / "keys/trainer.key", EPOCH, connect_timeout_s=0.3
        ):
            pass
    with pytest.raises(DeadlineExceeded, match="a welcome from the manager"):
        async with RolloutClient.connect(
            "tcp://127.0.0.1:9", tmp_path / "keys/trainer.key", EPOCH, connect_timeout_s=0.3
        ):
            pass
    assert time.monotonic() - began < DEADLINE_S


async def test_wrong_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    write_run_keys(tmp_path / "keys")
    (tmp_path / "manager.json").write_text("{}")
    with pytest.raises(InvalidData, match=r"manager\.json: not an endpoints file"):
        async with RolloutClient.connect(tmp_path / "manager.json", tmp_path / "keys/trainer.key", EPOCH):
            pass
    with pytest.raises(InvalidData, match=r"keys: the endpoints file cannot be read: Is a directory"):
        async with RolloutClient.connect(tmp_path / "keys", tmp_path / "keys/trainer.key", EPOCH):
            pass
    with pytest.raises(InvalidData, match=r"agent\.key: not a key file of trainer"):
        async with RolloutClient.connect(tmp_path / "manager.json", tmp_path / "keys/agent.key", EPOCH):
            pass


async def test_another_epoch_is_refused(site: Any) -> None:
    with pytest.raises(RunFailed, match="refuses this trainer: this is epoch 3, not 4"):
        async with site.client(run_epoch=EPOCH + 1):
            pass
    assert not site.manager.status().trainer_connected


async def test_the_trainer_that_greets_last_wins_for_good(site: Any) -> None:
    async with site.client() as old, site.client() as new:
        await new.submit([site.group(0)])
        with pytest.raises(Superseded, match="another trainer has taken this one's place"):
            await asyncio.wait_for(old.submit([site.group(0)]), DEADLINE_S)
        await new.submit([site.group(1)])
    assert site.manager.status().samples.submitted == 8


async def test_a_refusal_names_what_was_asked_and_why(site: Any) -> None:
    async with site.client() as client:
        with pytest.raises(RequestRefused, match="a submission of 1 groups was refused: group 0: n is 0"):
            await client.submit([site.group(0, n=0)])
        with pytest.raises(RequestRefused, match=r"the score of 7\.0 was refused: sample 7\.0 was never submitted"):
            await client.score("7.0", 0, 1.0)
        await client.submit([site.group(0)])


async def test_a_rejected_sample_drops_its_group_once(site: Any) -> None:
    agent = asyncio.create_task(site.agent("engine-1").run())
    async with site.client() as client:
        await client.publish(WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40, manifest_hash=b""))
        await client.submit([site.group(0), site.group(1)])
        async for turn in client.turns():
            await client.reject(turn.response.sample, DiscardReason.REWARD_RAISED, "ValueError: no")
            break
        await site.eventually(lambda: site.manager.status().samples.discarded)
        notice = await asyncio.wait_for(anext(client.dropped()), DEADLINE_S)
        assert notice.group in (0, 1)
        assert (notice.reason, notice.detail) == (DiscardReason.REWARD_RAISED, "ValueError: no")
        assert client.take_dropped() == []
    agent.cancel()


async def test_streams_end_with_the_run(site: Any) -> None:
    async with site.client() as client:
        turns = asyncio.create_task(site.judge_all(client))
        await client.finish(False, "no luck")
        await asyncio.wait_for(turns, DEADLINE_S)
        assert [notice async for notice in client.dropped()] == []
    assert site.manager.status().message == "no luck"


async def test_what_waits_when_the_client_is_closed_hears_of_it(site: Any) -> None:
    async with site.client() as client:
        await client.submit([site.group(0)])
        waiting = [
            asyncio.create_task(client.next(0, **ANY, deadline_s=10_000.0)),
            asyncio.create_task(site.judge_all(client)),
            asyncio.create_task(anext(client.dropped())),
        ]
        await asyncio.wait(waiting, timeout=0.1)
    for ended in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), DEADLINE_S):
        assert isinstance(ended, RunFailed), ended
        assert str(ended) == "the connection to the manager was closed"
    with pytest.raises(RunFailed, match="was closed"):
        await asyncio.wait_for(client.submit([site.group(1)]), DEADLINE_S)


async def test_a_stream_that_ended_with_the_run_is_no_failure_when_the_client_is_closed(site: Any) -> None:
    async with site.client() as client:
        await client.finish(True, "done")
    assert [notice async for notice in client.dropped()] == []


async def test_report_and_window_reach_the_status(site: Any) -> None:
    async with site.client() as client:
        await client.report("rl", 7, {"reward": 0.5})
        await client.end_step(0, Purpose.TRAIN)
    status = site.manager.status()
    assert (status.phase, status.step, status.values) == ("rl", 7, {"reward": 0.5})


def _manager(folder: Path) -> Manager:
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH, lease_s=0.5, beat_s=0.1))
    return Manager(ledger, read_keys(ManagerKeys, folder / "manager.key"), EPOCH, Listen())


async def test_a_manager_that_comes_back_elsewhere_is_found_and_asked_again(tmp_path: Path, site: Any) -> None:
    write_run_keys(tmp_path / "own")
    file = tmp_path / "manager.json"
    async with _manager(tmp_path / "own") as first:
        write_endpoints(first.endpoints, file)
        running = asyncio.create_task(first.run())
        connection = RolloutClient.connect(file, tmp_path / "own/trainer.key", EPOCH)
        client = await connection.__aenter__()
        await client.submit([site.group(0)])
        first.stop()
        await running
    asked = asyncio.create_task(client.submit([site.group(1)]))
    await asyncio.sleep(0)
    async with _manager(tmp_path / "own") as second:
        write_endpoints(second.endpoints, file)
        running = asyncio.create_task(second.run())
        await asyncio.wait_for(asked, DEADLINE_S)
        assert second.status().samples.submitted == 4
        await connection.__aexit__(None, None, None)
        second.stop()
        await running


@pytest.mark.parametrize("site", [1.0], indirect=True)
async def test_a_busy_loop_is_not_taken_for_a_silent_manager(site: Any) -> None:
    """The trainer's loop is blocked for longer than the lease; nothing is lost, and nothing greets anew."""
    async with site.client() as client:
        time.sleep(1.5)  # noqa: ASYNC251 - the point of the test
        await client.submit([site.group(0)])
        await client.submit([site.group(0)])
    assert site.manager.status().samples.submitted == 4


async def test_the_example_of_the_reference_page_runs_as_it_stands(site: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/client.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "client.md", "exec"), names)
    write_endpoints(site.manager.endpoints, tmp_path / "manager.json")
    weights = WeightsRef(0, "tcp://127.0.0.1:1", public_key="k" * 40)
    agent = asyncio.create_task(site.agent("engine-1").run())
    train = names["train"](tmp_path / "manager.json", site.keys / "trainer.key", EPOCH, weights)
    rewards = await asyncio.wait_for(train, DEADLINE_S)
    assert len(rewards) == 8
    assert min(rewards) > 1
    await asyncio.wait_for(agent, DEADLINE_S)


def test_the_learner_of_the_reference_page_learns(tmp_path: Path) -> None:
    """A stranger's loop: the page's second program, with a manager and an engine as processes of its own."""
    page = (Path(__file__).parents[3] / "docs/reference/client.md").read_text()
    (tmp_path / "own_loop.py").write_text(page.split("```python\n")[2].split("```")[0])
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-m", "polyrl.testing.script", str(tmp_path / "own_loop.py"), str(tmp_path / "run")]
    done = ran(command, timeout_s=LEARNER_DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    rewards = [float(reward) for reward in re.findall(r"^step \d+: reward ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(rewards) == 15
    assert rewards[-1] > rewards[0] + 0.3
    assert "manager and engine ended with [0, 0]" in done.stdout


def test_the_client_imports_no_torch() -> None:
    code = "import sys, polyrl_trainer.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False).returncode == 0
