"""Rewards in worker processes: none hangs, starves or outlives the trainer, and waiting costs nobody's deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyrl.errors import InvalidCode, RunFailed
from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import DiscardReason
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.pools import UserPools
from polyrl_trainer.user_code.rewards import Failures, RewardFunction
from polyrl_trainer.user_code.verdicts import Reward, Unscored
from polyrl_trainer.user_code.workers import worker_set
from polyrl_trainer.user_code.workers.messages import Serves, Setup
from polyrl_trainer.user_code.workers.pool import WorkerPool

LONG_S = 60.0
"""Of a call that is not meant to miss it."""
SHORT_S = 0.3
MIB = 2**20

CODE = """
import asyncio, ctypes, os, resource, signal, subprocess, sys, time

class Late(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def ring(*_):
    raise Late("rung")

def alarm(sample):
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(60)
    except Late:
        return 1.0

def ignoring(sample):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)

def spin(sample):
    while True:
        pass

def in_c(sample):
    ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock

def hog(sample):
    return len(bytearray(2**31))

def work(sample):
    time.sleep(0.05)
    return asyncio.run(asyncio.sleep(0, 1.0))

def rights(sample):
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    own = [os.readlink(one) for one in links if os.path.exists(one)]
    return {"reward": os.nice(0), "keys": sum(name.endswith("keys.json") for name in own), "pid": os.getpid(),
            "threads": int(os.environ["OMP_NUM_THREADS"]),
            "claimed": "POLYRL_PARENT_PID" in os.environ}

def read(sample):
    sample.metadata["n"] += 1
    sample.tokens[0] += 1
    fine = sample.metadata["day"].year == 2026 and str(sample.metadata["price"]) == "1.10"
    return {"reward": sample.metadata["n"] - 2**70, "fine": fine, "token": sample.tokens[0]}

def rest(sample):
    if sample.response == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(os.environ["CHILD"], "w").write(str(child.pid))
        time.sleep(60)
    if sample.response == "die":
        os._exit(3)
    if sample.response == "exit":
        sys.exit(4)
    if sample.response == "raise":
        raise KeyError("answer")
    if sample.response == "mute":
        raise Mute
    return os.getpid()

def leave_as(child):
    {"returns": lambda: None, "exits": sys.exit, "raises": lambda: 1 / 0}[child]()

def fork(sample):
    if not (pid := os.fork()):
        leave_as(sample.response)
        return 7.0
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

async def fork_async(sample):
    return fork(sample)

def apart(sample):
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    inner = f"import subprocess, time; print(subprocess.Popen({asleep}).pid, flush=True); time.sleep(600)"
    with open(os.environ["CHILD"], "w") as file:
        child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True, stdout=file)
        file.write(f"{child.pid}\\n")
    time.sleep(60)

def apart_and_gone(sample):
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with open(os.environ["CHILD"], "w") as file:
        file.write(str(subprocess.Popen(asleep, start_new_session=True).pid))
    os._exit(3)

def dispatch(sample):
    return globals()[sample.metadata["do"]](sample)

async def judge(sample):
    if sample.response == "block":
        time.sleep(60)
    if sample.response == "wait":
        await asyncio.sleep(60)
    if sample.response == "cancel":
        raise asyncio.CancelledError
    await asyncio.sleep(0.1)
    return os.getpid()

def arm():
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # without a handler it ends the process
    signal.setitimer(signal.ITIMER_PROF, 0.1)

async def alarm_async(sample):
    if sample.response == "rings":
        return alarm(sample)
    if sample.response == "forgets":
        arm()
    if sample.response == "waits":
        arm()
        await asyncio.sleep(0.3)
    if sample.response == "task":
        await asyncio.create_task(asyncio.to_thread(time.sleep, 0.01))
        await asyncio.gather(alarm_async(type(sample)(**{**vars(sample), "response": "forgets"})), asyncio.sleep(0.3))
    if sample.response == "spins":
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            await asyncio.sleep(0)
    return os.getpid()

def keep(samples):
    return sum(one.reward for one in samples) > 1

def leave(sample):
    return 1.0

def score_batch(samples):
    if any(one.response == "hang" for one in samples):
        time.sleep(60)
    return [{"reward": float(one.response), "together": len(samples)} for one in samples]

def score_group(samples):
    mean = sum(len(one.response) for one in samples) / len(samples)
    return [len(one.response) - mean for one in samples]
"""


def sample(response: str = "b", **metadata: Any) -> Sample:
    return Sample(
        np.array([1, 2]), np.array([0, 1], np.float32), prompt_length=1, id="4.0", response=response, metadata=metadata
    )


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "worker_code.py").write_text(CODE)
    return folder


def pool_of(code: Path, function: str, *, serves: Serves = Serves.REWARD) -> WorkerPool:
    pool = WorkerPool(Setup(f"worker_code:{function}", str(code), serves=serves, memory_bytes=1024 * MIB), 1, 8)
    pool.start()
    return pool


async def one_call(pool: WorkerPool, sample: Sample, timeout_s: float = LONG_S) -> Any:
    (verdict,) = await pool.call([sample], timeout_s)
    return verdict


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests of this module: a pool lives on the loop that it began on."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def warm(code: Path, runner: asyncio.Runner) -> Iterator[WorkerPool]:
    with closing(pool_of(code, "dispatch")) as pool:
        runner.run(pool.ready())
        yield pool


def test_what_a_reward_reads_is_its_own_copy_of_every_type(warm: WorkerPool, runner: asyncio.Runner) -> None:
    row = {"do": "read", "n": 2**70, "day": date(2026, 1, 2), "price": Decimal("1.10")}
    for _ in range(2):
        verdict = runner.run(one_call(warm, sample(**row)))
        assert verdict == Reward(1.0, {"fine": 1.0, "token": 2.0})
    assert row["n"] == 2**70


def test_a_worker_is_meek_and_holds_nothing_of_the_trainers(
    warm: WorkerPool, runner: asyncio.Runner, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text("secret")
    with keys.open():
        verdict = runner.run(one_call(warm, sample(do="rights")))
    assert isinstance(verdict, Reward)
    assert verdict.value >= 10
    assert verdict.metrics["keys"] == verdict.metrics["claimed"] == 0
    assert verdict.metrics["threads"] == 1


def test_an_alarm_rings_in_the_main_thread(warm: WorkerPool, runner: asyncio.Runner) -> None:
    assert runner.run(one_call(warm, sample(do="alarm"))) == Reward(1.0)


@pytest.mark.parametrize("how", ["forgets", "waits", "task"])
def test_an_alarm_ends_where_an_async_reward_gives_the_thread_back(
    how: str, code: Path, runner: asyncio.Runner
) -> None:
    async def main() -> tuple[Any, Any, Any]:
        await pool.ready()
        rung = await one_call(pool, sample("rings"))
        armed, beside = await asyncio.gather(one_call(pool, sample(how)), one_call(pool, sample("spins")))
        return rung, armed, beside

    with closing(pool_of(code, "alarm_async")) as pool:
        rung, armed, beside = runner.run(main())
    assert rung == Reward(1.0), "it rings where nothing is awaited meanwhile"
    assert isinstance(armed, Reward)
    assert armed == beside, "of the same process"


def test_waiting_for_a_worker_costs_no_deadline(warm: WorkerPool, runner: asyncio.Runner) -> None:
    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(one_call(warm, sample(do="work"), 1.0) for _ in range(30)))

    assert runner.run(all_at_once()) == [Reward(1.0)] * 30


@pytest.mark.parametrize("how", ["ignoring", "spin", "in_c"])
def test_what_hangs_is_ended_at_its_deadline_and_the_next_is_served(
    how: str, warm: WorkerPool, runner: asyncio.Runner
) -> None:
    reward = RewardFunction(warm, SHORT_S)
    verdict = runner.run(reward.score(sample(do=how)))
    assert verdict == Unscored(DiscardReason.REWARD_TIMED_OUT, f"no reward within {SHORT_S:g} s")
    assert reward.failures.counts == {"rewardTimedOut": 1}
    assert isinstance(runner.run(one_call(warm, sample(do="rest"))), Reward)


def test_what_it_started_ends_with_it(
    code: Path, runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    with closing(pool_of(code, "rest")) as pool:
        runner.run(pool.ready())
        verdict = runner.run(RewardFunction(pool, 2.0).score(sample("hang")))
        assert isinstance(verdict, Unscored)
        runner.run(gone(int((tmp_path / "child").read_text())))


def test_what_it_started_in_a_session_of_its_own_ends_with_it_too(
    code: Path, runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    with closing(pool_of(code, "apart")) as pool:
        runner.run(pool.ready())
        assert isinstance(runner.run(RewardFunction(pool, 2.0).score(sample())), Unscored)
        started = (tmp_path / "child").read_text().split()
        assert len(started) == 2
        for pid in started:
            runner.run(gone(int(pid)))


def test_what_it_started_there_ends_with_one_that_ends_by_itself(
    code: Path, runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    with closing(pool_of(code, "apart_and_gone")) as pool:
        runner.run(pool.ready())
        assert isinstance(runner.run(RewardFunction(pool, LONG_S).score(sample())), Unscored)
        runner.run(gone(int((tmp_path / "child").read_text())))


@pytest.mark.parametrize("function", ["fork", "fork_async"])
@pytest.mark.parametrize(("child", "status"), [("returns", 0.0), ("exits", 0.0), ("raises", 1.0)])
def test_a_child_that_it_forks_answers_nobody(
    function: str, child: str, status: float, code: Path, runner: asyncio.Runner
) -> None:
    with closing(pool_of(code, function)) as pool:
        runner.run(pool.ready())
        for _ in range(2):
            assert runner.run(one_call(pool, sample(child))) == Reward(status)


async def gone(pid: int) -> None:
    async with asyncio.timeout(LONG_S):
        while not has_ended(pid):  # noqa: ASYNC110 - another process's end has no event here
            await asyncio.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"do": "hog"}, "MemoryError"),
        ({"do": "rest", "response": "exit"}, "SystemExit: 4"),
        ({"do": "rest", "response": "raise"}, "KeyError: 'answer'"),
        ({"do": "rest", "response": "mute"}, "Mute"),
        ({"do": "rest", "response": "die"}, "its worker ended (exit 3), 2 times"),
    ],
    ids=["hog", "exit", "raise", "mute", "die"],
)
def test_what_fails_is_a_typed_discard_that_names_the_users_line(
    row: dict[str, str], detail: str, warm: WorkerPool, runner: asyncio.Runner
) -> None:
    verdict = runner.run(one_call(warm, sample(**{"response": "b", **row})))
    assert isinstance(verdict, Unscored)
    assert verdict.reason is DiscardReason.REWARD_RAISED
    assert detail in verdict.detail
    assert row.get("response") == "die" or "worker_code.py:" in verdict.detail


def test_one_that_somebody_kills_is_replaced_and_its_call_made_again(warm: WorkerPool, runner: asyncio.Runner) -> None:
    async def kill_under_a_call() -> Any:
        first = await one_call(warm, sample(do="rest"))
        assert isinstance(first, Reward)
        call = asyncio.create_task(one_call(warm, sample(do="rest")))
        os.kill(int(first.value), signal.SIGKILL)
        second = await call
        assert isinstance(second, Reward)

    runner.run(kill_under_a_call())


def test_one_that_has_served_long_enough_is_replaced(
    warm: WorkerPool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = warm._living
    monkeypatch.setattr(worker_set, "CALLS_PER_WORKER", worker.calls + 1)
    verdicts = [runner.run(one_call(warm, sample(do="rest"))) for _ in range(2)]
    assert len({verdict.value for verdict in verdicts if isinstance(verdict, Reward)}) == 2


def test_async_ones_share_a_worker_and_one_that_blocks_it_costs_the_others_nothing(
    code: Path, runner: asyncio.Runner
) -> None:
    async def main() -> None:
        await pool.ready()
        together = await asyncio.gather(*(one_call(pool, sample()) for _ in range(8)))
        assert len({verdict.value for verdict in together if isinstance(verdict, Reward)}) == 1
        reward, unhurried = RewardFunction(pool, SHORT_S), RewardFunction(pool, LONG_S)
        cancelled = await unhurried.score(sample("cancel"))
        assert isinstance(cancelled, Unscored)
        assert cancelled.reason is DiscardReason.REWARD_RAISED
        late = await reward.score(sample("wait"))
        same = await one_call(pool, sample())
        assert same == together[0], "who waits is cancelled, not killed"
        blocked, beside = await asyncio.gather(reward.score(sample("block")), unhurried.score(sample()))
        assert isinstance(beside, Reward)
        assert {one.reason for one in (late, blocked) if isinstance(one, Unscored)} == {DiscardReason.REWARD_TIMED_OUT}

    with closing(pool_of(code, "judge")) as pool:
        runner.run(main())


def test_a_filter_gets_the_whole_group_with_its_rewards(code: Path, runner: asyncio.Runner) -> None:
    async def main() -> None:
        await pool.ready()
        samples = [Sample(np.array([1]), np.array([0], np.float32), 1, reward=reward) for reward in (1.0, 0.5)]
        assert await pool.call(samples, LONG_S) == [None]
        (refused,) = await pool.call(samples[1:], LONG_S)
        assert isinstance(refused, Unscored)
        assert refused.reason is DiscardReason.FILTERED

    with closing(pool_of(code, "keep", serves=Serves.FILTER)) as pool:
        runner.run(main())


def test_a_batch_goes_in_one_call_and_one_that_hangs_costs_itself_alone(code: Path, runner: asyncio.Runner) -> None:
    async def main() -> list[Any]:
        await pools.ready()
        function = pools.reward_function(spec.reward, Failures({}, {}))
        return await asyncio.gather(*(function.score(sample(text)) for text in ("1", "2", "3")), function.score(hangs))

    hangs = sample("hang")
    spec = recipe_of(code, "score_batch")
    with closing(UserPools.start(spec, code)) as pools:
        *scored, late = runner.run(main())
    assert [one.value for one in scored] == [1.0, 2.0, 3.0]
    assert late == Unscored(DiscardReason.REWARD_TIMED_OUT, "no reward within 1 s")


def test_a_group_goes_in_one_call_when_all_its_samples_are_there(code: Path, runner: asyncio.Runner) -> None:
    async def main() -> list[Any]:
        await pools.ready()
        function = pools.reward_function(spec.reward, Failures({}, {}))
        siblings = [replace(sample("b" * n), id=f"4.{n}", group=4) for n in (2, 0, 1)]
        return await asyncio.gather(*(function.score(one, 3) for one in siblings))

    spec = recipe_of(code, "score_group")
    with closing(UserPools.start(spec, code)) as pools:
        assert pools.scores_groups
        assert runner.run(main()) == [Reward(1.0), Reward(-1.0), Reward(0.0)]


def recipe_of(code: Path, function: str) -> Any:
    return RecipeSpec(
        model={"config": {"model_type": "qwen2"}},
        code={"path": str(code)},
        reward={"function": f"worker_code:{function}", "timeout_seconds": 1, "workers": 1},
    )


def test_code_that_cannot_be_imported_is_refused_and_later_ends_the_run(
    code: Path, runner: asyncio.Runner, tmp_path: Path
) -> None:
    with (
        closing(pool_of(code, "nothing")) as pool,
        pytest.raises(InvalidCode, match="worker_code:nothing: module `worker_code` has no `nothing`"),
    ):
        runner.run(pool.ready())
    file = tmp_path / "worker_code.py"
    file.write_text("import os\ndef leave(sample):\n    os._exit(3)\n")

    async def main() -> None:
        await pool.ready()
        file.unlink()
        await one_call(pool, sample())

    with closing(pool_of(tmp_path, "leave")) as pool, pytest.raises(RunFailed, match="no worker can be started"):
        runner.run(main())


def test_no_worker_outlives_a_killed_trainer(code: Path, runner: asyncio.Runner) -> None:
    program = (
        "import asyncio, sys, time\n"
        "from polyrl_trainer.user_code.workers.messages import Serves, Setup\n"
        "from polyrl_trainer.user_code.workers.pool import WorkerPool\n"
        "pool = WorkerPool(Setup('worker_code:leave', sys.argv[1], serves=Serves.REWARD, memory_bytes=2**30), 1, 1)\n"
        "pool.start()\n"
        "asyncio.run(pool.ready())\n"
        "print(*(one.process.pid for one in pool._living), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(code)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        assert not has_ended(worker)
        trainer.kill()
    runner.run(gone(worker))
