"""While engines load new weights one after the other, each gets its share of what waits."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.ledger import Ledger
from polyrl.sample import Pool
from polyrl.wire import WeightsLoaded
from polyrl_rollout.testing.stage import Stage

LOADED_S = 2.0


class Lasting(Stage):
    """With four engines of 16 slots that load version 1, and 16 samples that need it."""

    def __init__(self, engines: str = "abcd", loaded_s: float = LOADED_S) -> None:
        super().__init__()
        for name in engines:
            self.engine(name, max_running=16)
        self.publish(1)
        self.submit(16, min_version=1, max_version=1)
        self.now += loaded_s

    def _current(self) -> Ledger:
        return self.ledger

    def measured(self, name: str, step_s: float) -> None:
        """How fast it is known to be."""
        engine = self.ledger.state.engines[name]
        engine.step_scale, engine.half_batch, engine.token_at = step_s, 64.0, self.now

    def loaded(self, name: str) -> int:
        """The engine serves version 1; how many samples it has then."""
        self.agent(name, WeightsLoaded(1, 0.1, load_seconds=LOADED_S, bytes_pulled=100))
        return len(self.placed()[name])


def test_each_gets_its_share_though_one_comes_first() -> None:
    stage = Lasting()
    shares = []
    for name in "abcd":
        shares.append(stage.loaded(name))
        stage.now += 0.04
    assert shares == [4, 4, 4, 4]


def test_who_is_alone_gets_all_at_once() -> None:
    assert Lasting("a").loaded("a") == 16


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        pytest.param({}, 0, id="a machine of the spot pool may take minutes"),
        pytest.param({"pool": Pool.RESERVED}, 8, id="the trainer's own comes"),
        pytest.param({"pool": Pool.RESERVED, "sleeps": True, "asleep": True}, 0, id="it sleeps"),
    ],
)
def test_the_trainers_own_is_awaited_also_with_its_first_weights(own: dict[str, Any], kept: int) -> None:
    """Without others it would have all of it, and what is given away comes back late."""
    stage = Lasting("a")
    stage.engine("own", version=-1, max_running=16, **own)
    stage.loaded("a")
    stage.pass_time(0.1)
    assert len(stage.placed()["a"]) == 16 - kept
    stage.pass_time(0.2)
    assert len(stage.placed()["a"]) == 16


@pytest.mark.parametrize(
    ("loaded_s", "waited_s"),
    [
        pytest.param(2.0, 0.2, id="a tenth of what the first one took"),
        pytest.param(600.0, 0.5, id="half a second at most"),
        pytest.param(0.1, 0.05, id="a twentieth of a second at least"),
    ],
)
def test_who_is_late_is_not_waited_for(loaded_s: float, waited_s: float) -> None:
    stage = Lasting(loaded_s=loaded_s)
    assert stage.loaded("a") == 4
    stage.pass_time(0.8 * waited_s)
    assert len(stage.placed()["a"]) == 4
    due = stage.ledger.next_due()
    assert due is not None
    assert due <= stage.now + waited_s
    stage.pass_time(0.3 * waited_s)
    assert len(stage.placed()["a"]) == 16
    assert stage.loaded("b") <= 16


def test_a_clock_that_stops_short_of_the_end_comes_to_it() -> None:
    stage = Lasting()
    stage.loaded("a")
    stage.pass_time(0.2 - 1e-9)
    due = stage.ledger.next_due()
    assert due is not None
    assert due > stage.now + 1e-3


def test_engines_at_the_version_before_take_what_may_have_it() -> None:
    stage = Lasting("a")
    stage.engine("wide", max_running=64)
    stage.loaded("a")
    stage.submit(48, min_version=0, max_version=0)
    assert len(stage.placed()["wide"]) == 48


def test_what_is_done_is_in_nobodys_share() -> None:
    stage = Lasting(loaded_s=0.0)
    stage.submit(64)
    while stage.ledger.state.assignments:
        stage.finish_all()
    stage.now += LOADED_S
    assert [stage.loaded(name) for name in "abcd"] == [4, 4, 4, 4]


def test_who_has_no_weights_yet_is_awaited_for_a_moment_only() -> None:
    stage = Lasting("a")
    for name in ("new", "broken", "booting"):
        stage.engine(name, version=-1)
    assert stage.loaded("a") == 4
    due = stage.ledger.next_due()
    assert due is not None
    stage.pass_time(due - stage.now)
    assert stage.now < LOADED_S + 0.06
    assert len(stage.placed()["a"]) == 16


def test_what_is_submitted_long_after_the_first_load_is_not_shared() -> None:
    stage = Stage()
    for name in "ab":
        stage.engine(name, max_running=16)
    stage.publish(1)
    stage.submit()
    stage.now += LOADED_S
    stage.agent("a", WeightsLoaded(1, 0.1, load_seconds=LOADED_S, bytes_pulled=100))
    stage.pass_time_heard(20.0)
    stage.submit(16, min_version=1, max_version=1)
    assert len(stage.placed()["a"]) >= 15


def test_who_has_its_share_is_awaited_where_others_are_far_slower() -> None:
    stage = Lasting()
    for name, step_s in (("a", 0.02), ("b", 0.2), ("c", 0.2)):
        stage.measured(name, step_s)
    assert [stage.loaded(name) for name in "abc"] == [4, 0, 0]
    stage.pass_time(0.21)
    assert len(stage.placed()["a"]) == 16


def test_of_many_that_wait_for_the_faster_one_some_are_better_off_elsewhere() -> None:
    stage = Lasting()
    for name, step_s in (("a", 0.02), ("b", 0.0235)):
        stage.measured(name, step_s)
    assert stage.loaded("a") == 4
    assert 2 <= stage.loaded("b") <= 4


def test_those_that_have_their_share_leave_room_among_the_candidates() -> None:
    stage = Lasting("abcdefghijk")
    stage.submit(28, min_version=1, max_version=1)
    for name in "abcdefghij":
        stage.measured(name, 0.0205 if name == "j" else 0.02)
    assert [stage.loaded(name) for name in "abcdefghij"] == [4] * 10


def test_the_first_load_counts_and_later_ones_put_nothing_off() -> None:
    stage = Lasting()
    stage.loaded("a")
    stage.pass_time(0.15)
    stage.loaded("b")
    stage.pass_time(0.06)
    assert sum(map(len, stage.placed().values())) == 16


def test_beside_one_that_is_late_who_has_no_weights_counts_for_a_moment_only() -> None:
    stage = Lasting("ab")
    stage.engine("new", version=-1)
    stage.engine("broken", version=-1)
    assert stage.loaded("a") == 4
    stage.pass_time(0.06)
    assert len(stage.placed()["a"]) == 8


class Running(Lasting):
    """Twelve samples that may have version 1 run on an engine at version 0, 16 that need it wait for two others."""

    def __init__(self) -> None:
        Stage.__init__(self)
        self.engine("old", max_running=64)
        self.submit(12, max_version=1, max_new_tokens=1000)
        for name in "ab":
            self.engine(name, version=-1, max_running=32)
        self.publish(1)
        self.submit(16, min_version=1, max_version=1)
        self.measured("a", 0.02)
        self.measured("old", 0.5)

    def occupied(self) -> int:
        """Slots of the first one that are taken or set aside."""
        return self.ledger.state.engines["a"].occupied


def test_what_runs_moves_to_nobody_that_has_its_share() -> None:
    stage = Running()
    stage.now = LOADED_S
    stage.tokens("old", 0, [])
    stage.loaded("a")
    assert stage.occupied() == 10
    stage.pass_time(0.21)
    assert stage.occupied() == 28


def test_what_a_silent_engine_runs_goes_to_nobody_that_has_its_share() -> None:
    stage = Running()
    stage.now = 2.0
    for name in "ab":
        stage.tokens(name, 0, [])
    stage.pass_time(1.5)
    assert stage.ledger.state.engines["old"].silent
    stage.loaded("a")
    assert stage.occupied() == 10
