"""Environments in worker processes: one that blocks or dies costs its own sample, and no other, and never the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from polyrl.sample import DiscardReason, split_sample_id
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.episodes import EpisodeFailed, Episodes, PastTurn, Played
from polyrl_trainer.user_code.workers import worker_set
from polyrl_trainer.user_code.workers.environments import EnvironmentPool
from polyrl_trainer.user_code.workers.messages import Serves, Setup

TOKENIZER = CharacterTokenizer("0123456789")
TIMEOUT_S = 1.0
LONG_S = 20.0
STALL_S = 0.5
"""Longest that the trainer's loop may stand still beside environments that block for seconds."""
CODE = """
import asyncio, os, signal, sys, time

class Late(Exception):
    pass

def ring(*_):
    raise Late

class Env:
    async def run(self, sample, generate):
        for what in sample.metadata["plan"]:
            sample = await generate(await self.next(what, sample), reward=1)

    async def next(self, what, sample):
        if what == "block":
            time.sleep(60)
        if what == "share":
            time.sleep(0.4)
            await asyncio.sleep(0.3)
        if what == "beside":
            await asyncio.create_task(self.next("block", sample))
        if what == "wait":
            await asyncio.sleep(60)
        if what == "slow":
            await asyncio.sleep(0.5)
        if what == "die":
            os._exit(3)
        if what == "exit":
            sys.exit(4)
        if what == "raise":
            raise KeyError("answer")
        if what == "alarm":
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                time.sleep(60)
            except Late:
                return "7"
        if what == "forgets":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        if what in ("fork", "fork-exits"):
            if not (child := os.fork()):
                return "9" if what == "fork" else sys.exit(0)
            return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if what == "pid":
            return str(os.getpid())
        await asyncio.sleep(0)
        return str(len(sample.response))
"""


def sample(name: str, *plan: str, response: str = "") -> Sample:
    return Sample(
        np.array([1]), np.array([0], np.float32), prompt_length=1, id=name, response=response, metadata={"plan": plan}
    )


def no_past() -> list[PastTurn]:
    return []


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests of this module: a pool lives on the loop that it began on."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, runner: asyncio.Runner) -> Iterator[EnvironmentPool]:
    folder = tmp_path_factory.mktemp("code")
    (folder / "env_code.py").write_text(CODE)
    setup = Setup("env_code:Env", str(folder), serves=Serves.ENVIRONMENT, memory_bytes=2**30, timeout_s=TIMEOUT_S)
    with closing(EnvironmentPool(setup, 1)) as made:
        made.start()
        runner.run(made.ready())
        yield made


@pytest.fixture
def episodes(pool: EnvironmentPool) -> Iterator[Episodes]:
    made = Episodes(pool, 8, tokenizer=TOKENIZER)
    yield made
    for name in list(made._rewards):
        made.forget(split_sample_id(name)[0])


async def longest_stall(ends: asyncio.Event) -> float:
    loop, longest = asyncio.get_running_loop(), 0.0
    while not ends.is_set():
        began = loop.time()
        await asyncio.sleep(0.01)
        longest = max(longest, loop.time() - began)
    return longest


async def outcome(episodes: Episodes, one: Sample, turn: int = 0, past: Any = no_past) -> str | None:
    """What it wrote, or why not."""
    try:
        return (await episodes.play(one, turn, past)).text
    except EpisodeFailed as failed:
        return f"{failed.reason.value}: {failed.detail}"


def test_those_that_block_are_ended_and_the_trainers_loop_goes_on(episodes: Episodes, runner: asyncio.Runner) -> None:
    async def main() -> list[Any]:
        ends = asyncio.Event()
        watching = asyncio.create_task(longest_stall(ends))
        found = await asyncio.gather(*(outcome(episodes, sample(f"1.{n}", "block")) for n in range(2)))
        ends.set()
        return [await watching, *found]

    stalled, *found = runner.run(main())
    assert found == [f"environmentFailed: no answer within {TIMEOUT_S:g} s"] * 2
    assert stalled < STALL_S


@pytest.mark.parametrize("at_fault", ["block", "beside", "die"])
def test_the_neighbours_of_one_that_blocks_or_dies_go_on_from_their_recorded_turns(
    at_fault: str, episodes: Episodes, runner: asyncio.Runner
) -> None:
    first = sample("2.0", "length", "length", "length")
    second = sample("2.0", "length", "length", "length", response="00")
    third = sample("2.0", "length", "length", "length", response="0022")
    past = [PastTurn(first, TOKENIZER.encode_text("0")), PastTurn(second, TOKENIZER.encode_text("2"))]

    async def main() -> list[Any]:
        before = [await outcome(episodes, first), await outcome(episodes, second, 1)]
        blamed = await outcome(episodes, sample("3.0", at_fault))
        assert not episodes.conversations.runs("2.0")
        after = await episodes.play(third, 2, lambda: past)
        assert after.turn_rewards == (1.0, 1.0, 1.0)
        episodes.forget(2)
        assert not episodes.conversations.runs("2.0")
        return [*before, after.text, blamed]

    *texts, blamed = runner.run(main())
    assert texts == ["0", "2", "4"]
    expected = "its worker ended (exit 3), 2 times" if at_fault == "die" else f"no answer within {TIMEOUT_S:g} s"
    assert blamed == f"environmentFailed: {expected}"


def test_one_that_is_under_way_while_others_end_its_worker_twice_is_not_blamed(
    episodes: Episodes, runner: asyncio.Runner
) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(
            *(outcome(episodes, sample(f"10.{n}", one)) for n, one in enumerate(("slow", "die")))
        )

    slow, died = runner.run(main())
    assert slow == "0"
    assert died == "environmentFailed: its worker ended (exit 3), 2 times"


def test_one_that_does_not_repeat_itself_has_a_reason_of_its_own(episodes: Episodes, runner: asyncio.Runner) -> None:
    async def main() -> str | None:
        first = await outcome(episodes, sample("4.0", "pid", "pid"))
        assert first is not None
        await outcome(episodes, sample("5.0", "block"))
        past = [PastTurn(sample("4.0", "pid", "pid"), TOKENIZER.encode_text(first))]
        return await outcome(episodes, sample("4.0", "pid", "pid", response="0"), 1, lambda: past)

    found = runner.run(main())
    assert found is not None
    assert found.startswith(DiscardReason.ENVIRONMENT_DIVERGED.value)


def test_waiting_for_the_thread_costs_no_deadline(episodes: Episodes, runner: asyncio.Runner) -> None:
    async def main() -> list[Any]:
        every = [outcome(episodes, sample(f"6.{n}", "share")) for n in range(4)]
        return await asyncio.gather(*every, outcome(episodes, sample("6.4", "wait")))

    *shared, waited = runner.run(main())
    assert shared == ["0"] * 4
    assert waited == f"environmentFailed: no answer within {TIMEOUT_S:g} s"


@pytest.mark.parametrize(
    ("plan", "expected"),
    [("raise", "KeyError: 'answer'"), ("exit", "RuntimeError: SystemExit"), ("wait", "no answer within")],
)
def test_what_fails_is_typed_and_costs_its_worker_nothing(
    plan: str, expected: str, episodes: Episodes, runner: asyncio.Runner
) -> None:
    async def main() -> list[Any]:
        return [await outcome(episodes, sample(f"7.{n}", one)) for n, one in enumerate(("pid", plan, "pid"))]

    before, failed, after = runner.run(main())
    assert before == after
    assert failed.startswith(f"environmentFailed: {expected}")


@pytest.mark.parametrize("how", ["fork", "fork-exits"])
def test_a_child_that_it_forks_answers_nobody(how: str, episodes: Episodes, runner: asyncio.Runner) -> None:
    for number in range(2):
        first, turn = sample(f"{number}.0", how), sample(f"{number}.0", how, response="ab")
        assert runner.run(episodes.play(first, 0, no_past)) == Played("0", (1.0,))
        assert runner.run(episodes.play(turn, 1, no_past)) == Played(None, (1.0, 0.0))


def test_an_alarm_rings_and_an_episode_ends(episodes: Episodes, runner: asyncio.Runner) -> None:
    assert runner.run(outcome(episodes, sample("8.0", "alarm"))) == "7"
    assert runner.run(outcome(episodes, sample("8.0", "alarm", response="7"), 1)) is None


def test_an_alarm_that_an_environment_forgot_ends_no_worker(
    pool: EnvironmentPool, episodes: Episodes, runner: asyncio.Runner
) -> None:
    (worker,) = pool._living
    assert runner.run(outcome(episodes, sample("9.0", "forgets"))) == "0"
    assert runner.run(outcome(episodes, sample("9.1", "slow"))) == "0"
    assert worker in pool._living


def test_one_that_has_served_long_enough_ends_with_its_last_conversation(
    pool: EnvironmentPool, episodes: Episodes, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = pool._living
    monkeypatch.setattr(worker_set, "CALLS_PER_WORKER", worker.calls + 1)

    async def main() -> list[Any]:
        old = await outcome(episodes, sample("9.0", "pid", "pid"))
        new = await outcome(episodes, sample("9.1", "pid", "pid"))
        same = await outcome(episodes, sample("9.0", "pid", "pid", response="0"), 1)
        episodes.forget(9)
        async with asyncio.timeout(LONG_S):
            while len(pool._living) > 1:  # noqa: ASYNC110 - another process's end has no event here
                await asyncio.sleep(0.01)
        return [old, new, same]

    old, new, same = runner.run(main())
    assert old == same != new
