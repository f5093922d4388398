"""Whose words reach the ledger, by the sums in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from polyrl.sample import Pool
from polyrl.weights import WeightsRef
from polyrl.weights.engine_sums import OTHER_WEIGHTS, EngineSum
from polyrl.wire import Deregister, Hello, PublishVersion, WeightsLoaded
from polyrl_rollout.manager.sums import SumCheck
from polyrl_rollout.testing.stage import Stage

HELLO = Hello(1, "a", pool=Pool.SPOT, max_running=8, kv_tokens=100_000, max_context=4096, weight_version=-1)


class Checked:
    """A check beside a ledger to which version 1 was published."""

    def __init__(self, receipt: bytes = b"r1") -> None:
        self.stage = Stage()
        where = WeightsRef(1, "tcp://p", public_key="k", manifest_hash=b"m", content=b"c1", receipt=receipt)
        self.stage.trainer(PublishVersion.of(self.stage.request(), where))
        for name in "ab":
            self.stage.agent(name, msgspec.structs.replace(HELLO, engine=name))
        self.refused: list[tuple[str, str]] = []
        self.noted: list[str] = []
        state = self.stage.ledger.state
        self.check = SumCheck(state, refuse=self._refuse, note=lambda engine, text: self.noted.append(text))

    def _refuse(self, engine: str, reason: str) -> None:
        self.refused.append((engine, reason))
        if engine in self.stage.ledger.state.engines:
            self.stage.agent(engine, Deregister(reason))


def loaded(text: str, version: int = 1, receipt: bytes = b"r1") -> WeightsLoaded:
    given = EngineSum("kind", text.encode(), exact=True)
    return WeightsLoaded(version, 0.1, load_seconds=0.1, bytes_pulled=9, receipt=receipt, sum=given)


def greeting(text: str, receipts: dict[int, bytes]) -> Hello:
    given = EngineSum("kind", text.encode(), exact=True)
    return msgspec.structs.replace(HELLO, weight_version=1, receipts=receipts, sum=given)


def test_versions_that_differ_by_a_file_alone_have_one_sum() -> None:
    checked = Checked()
    where = WeightsRef(2, "tcp://p", public_key="k", manifest_hash=b"n", content=b"c2", receipt=b"r1")
    checked.stage.trainer(PublishVersion.of(checked.stage.request(), where))
    assert all(checked.check.admits("a", loaded("A", version=version)) for version in (1, 2))


def test_an_engine_that_greets_with_nothing_is_another_one_than_before() -> None:
    checked = Checked()
    where = WeightsRef(2, "tcp://p", public_key="k", manifest_hash=b"n", content=b"c2", receipt=b"r2")
    checked.stage.trainer(PublishVersion.of(checked.stage.request(), where))
    assert checked.check.admits("a", loaded("A"))
    assert checked.check.admits("a", HELLO)
    assert checked.check.admits("a", loaded("A", version=2, receipt=b"r2"))


@pytest.mark.parametrize("word", [loaded("B"), greeting("B", {1: b"r1"})], ids=["loaded", "greeting"])
def test_another_sum_is_refused_however_it_is_said(word: Any) -> None:
    checked = Checked()
    assert checked.check.admits("a", loaded("A"))
    assert not checked.check.admits("b", word)
    assert checked.refused == [("b", OTHER_WEIGHTS)]
    assert not checked.check.admits("b", word)
    assert len(checked.refused) == 2, "it may not have heard it"
    assert len(checked.noted) == 1, "but people have"


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(loaded("B", receipt=b""), id="without a receipt"),
        pytest.param(loaded("B", receipt=b"r2"), id="with another version's"),
        pytest.param(loaded("B", version=2, receipt=b"r1"), id="of a version that nobody published"),
        pytest.param(loaded("B", version=-1), id="of none"),
        pytest.param(greeting("B", {}), id="a greeting without a receipt"),
        pytest.param(msgspec.structs.replace(loaded("B"), sum=None), id="without a sum"),
    ],
)
def test_words_that_the_ledger_does_not_believe_are_left_to_it(word: Any) -> None:
    checked = Checked()
    checked.check.admits("a", loaded("A"))
    assert checked.check.admits("b", word)
    assert not checked.check.outcomes["refused"]


def test_of_a_trainer_without_receipts_versions_are_compared_all_the_same() -> None:
    checked = Checked(receipt=b"")
    assert checked.check.admits("a", loaded("A"))
    assert not checked.check.admits("b", loaded("B"))
    assert all(checked.check.admits("b", loaded("B", version=version)) for version in (-1, 2))
    assert checked.check.outcomes == {"first": 1, "equal": 0, "incomparable": 0, "refused": 1}


def test_others_are_refused_by_the_word_of_one_that_is_admitted() -> None:
    checked = Checked()
    for engine in "bc":
        checked.check.admits(engine, msgspec.structs.replace(HELLO, engine=engine))
    checked.check.admits("a", loaded("A"))
    checked.check.admits("b", loaded("B"))
    checked.stage.agent("c", msgspec.structs.replace(HELLO, engine="c"))
    assert checked.check.admits("c", loaded("B"))
    assert [engine for engine, _ in checked.refused] == ["b", "a"]
