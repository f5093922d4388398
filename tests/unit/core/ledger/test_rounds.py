"""A look at many things takes several ticks, and forgets none."""

from __future__ import annotations

from math import inf

import pytest

from polyrl.ledger import Effects, Ledger, fleet
from polyrl.ledger.fleet import Round
from polyrl.wire import Heartbeat, TrainerHeartbeat, TurnsAwaited
from polyrl_rollout.testing.stage import Stage, sent


class Lasting(Stage):
    """A stage whose ledger keeps its looks from call to call, with one engine of many slots."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.engine("a", max_running=count)
        self.submit(count)

    def _current(self) -> Ledger:
        return self.ledger

    def go_on(self, until: float) -> list[Effects]:
        """All ticks until then."""
        found = []
        while self.now < until:
            self.now = round(self.now + 0.1, 6)
            self.agent("a", Heartbeat(0, 0, kv_free_tokens=100_000))
            self.trainer(TrainerHeartbeat())
            found.append(self.pass_time(0.0))
        return found


def test_a_round_reads_everything_once_and_is_due_by_the_least_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "AT_ONCE", 2)
    one: Round[int] = Round()
    seen, due = [], 7.0
    while due == 7.0:
        some = one.some(range(5), now=7.0)
        seen.append(some)
        due = one.due_after(some, (100.0 - number for number in some), 7.0, shortest_s=300.0)
    assert seen == [[0, 1], [2, 3], [4]]
    assert due == 96.0
    assert one.some([9], now=8.0) == [9], "and then begins anew"


@pytest.mark.parametrize(("count", "due"), [(1, inf), (3, 17.0)], ids=["in one tick", "in two"])
def test_what_came_while_a_round_went_on_is_looked_at_in_time(
    count: int, due: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "AT_ONCE", 2)
    one: Round[int] = Round()
    for _ in range(1 + count // 2):
        some = one.some(range(count), now=7.0)
        found = one.due_after(some, (), 7.0, shortest_s=10.0)
    assert found == due


def test_a_stuck_engine_loses_all_that_it_runs_and_fails_once_however_much_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tick of 2,000 engines with 128,000 samples read all of them, and took a fifth of a second."""
    monkeypatch.setattr(fleet, "AT_ONCE", 3)
    stage = Lasting(10)
    stage.go_on(29.0)
    assert len(stage.placed()["a"]) == 10
    stage.go_on(32.0)
    assert stage.placed()["a"] == []
    assert stage.ledger.state.engines["a"].failures == 1


def test_every_late_verdict_is_asked_for_and_no_tick_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "AT_ONCE", 3)
    stage = Lasting(10)
    for number in tuple(stage.ledger.state.assignments):
        stage.tokens("a", number, [5, 2], "stop")
    asked = [message.turns for outcome in stage.go_on(12.0) for message in sent(outcome, TurnsAwaited)]
    assert sorted(name for turns in asked for name, _ in turns) == [f"{group}.0" for group in range(10)]
    assert max(map(len, asked)) <= 3
