"""What waits for KV room keeps one engine, where it comes free first, and starves neither others nor itself."""

from __future__ import annotations

import pytest

from polyrl.ledger import Ledger, speed
from polyrl.sample import Purpose
from polyrl.wire import Deregister, EndStep, pack_ids
from polyrl_rollout.testing.stage import Stage

LARGE, SMALL = 150, 10
"""Prompt tokens: of 300 KV tokens an engine has room for one large sample and a small one."""


@pytest.fixture(autouse=True)
def what_is_measured_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is tried for being unknown."""
    monkeypatch.setattr(speed, "OPTIMISM", 1.0)


class Kept(Stage):
    """Engines with little KV room. What a look has found stays with its ledger."""

    def __init__(self, engines: str, **budgets: int) -> None:
        """`budgets`: of the large sample that each engine runs; none without."""
        super().__init__()
        for name in engines:
            self.engine(name, kv_tokens=300)
            self.sample(LARGE, budgets.get(name, 100))

    def _current(self) -> Ledger:
        return self.ledger

    def sample(self, prompt: int, budget: int) -> str:
        """One is submitted; where it is placed, "" while it waits."""
        self.submit(1, prompt_ids=pack_ids([9] * prompt), max_new_tokens=budget)
        return self.where(self.ledger.state.next_group - 1)

    def where(self, group: int) -> str:
        number = self.number(f"{group}.0")
        return self.ledger.state.assignments[number].engine if number else ""

    @property
    def kept(self) -> list[str]:
        return [engine for engine, _ in self.ledger.fleet.kept.values()]


@pytest.mark.parametrize(("a", "b", "first"), [(100, 60, "b"), (60, 100, "a")], ids=["b first", "a first"])
def test_one_engine_is_kept_where_room_comes_free_first_and_the_other_goes_on(a: int, b: int, first: str) -> None:
    """All engines with the context for it idled beside whatever waited behind it."""
    stage = Kept("ab", a=a, b=b)
    assert stage.sample(LARGE, 100) == ""
    assert stage.kept == [first]
    assert stage.sample(SMALL, 30) != ""
    assert {stage.where(0), stage.where(1)} == {"a", "b"}


@pytest.mark.parametrize(("budget", "is_placed"), [(50, True), (110, False)], ids=["ended before", "ended later"])
def test_a_kept_engine_takes_what_ends_before_its_room_comes_free(budget: int, is_placed: bool) -> None:
    stage = Kept("a", a=100)
    stage.ledger.state.engines["a"].capacity = stage.ledger.state.engines["a"].capacity.__replace__(kv_tokens=390)
    assert stage.sample(LARGE, 100) == ""
    assert bool(stage.sample(SMALL, budget)) is is_placed


def test_each_that_waits_keeps_another_engine_while_there_is_one() -> None:
    stage = Kept("ab")
    for _ in range(3):
        assert stage.sample(LARGE, 100) == ""
    assert sorted(stage.kept) == ["a", "b"]


def test_nothing_new_comes_once_its_room_was_expected_however_long_it_takes() -> None:
    """Else what is always expected to end soon would be followed by the like for ever."""
    stage = Kept("a")
    stage.sample(LARGE, 100)
    stage.pass_time(2.9)
    stage.tokens("a", 1, [5])
    assert stage.sample(SMALL, 1) == "a"
    stage.pass_time(0.3)
    stage.tokens("a", 1, [5])
    assert stage.sample(SMALL, 1) == ""
    stage.tokens("a", 1, [5, 2], "stop")
    assert stage.where(1) == "a"
    assert not stage.kept
    assert stage.where(3) == "a"


def test_of_an_engine_that_is_gone_nothing_is_kept() -> None:
    stage = Kept("ab", a=60)
    stage.sample(LARGE, 100)
    assert stage.kept == ["a"]
    stage.agent("a", Deregister("test"))
    assert stage.kept
    assert set(stage.kept) == {"b"}


def test_what_is_discarded_keeps_nothing() -> None:
    stage = Kept("ab")
    stage.sample(LARGE, 100)
    stage.trainer(EndStep(stage.request(), 0, purpose=Purpose.TRAIN))
    stage.submit(1, step=1)
    assert not stage.kept
