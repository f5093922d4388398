"""What no model can have sampled is refused, and the engine that sends it pauses."""

from __future__ import annotations

from math import inf, nan

import msgspec
import numpy as np
import pytest

from polyrl.ledger import LedgerConfig
from polyrl.ledger.messages.sampled import LOGPROB_SLACK, can_be_sampled
from polyrl.ledger.state import SamplePhase
from polyrl.weights import WeightsRef
from polyrl.wire import FINISH_CODES, Deltas, PublishVersion, decode_from_trainer, encode, pack_ids, pack_rows
from polyrl_rollout.testing.stage import Stage, replay, snapshot

VOCABULARY = 100


def column(*logprobs: float) -> bytes:
    return np.array(logprobs, "<f4").tobytes()


CASES = {
    "nothing": ([], [], True),
    "the last id": ([0, 99], [-0.1, -30.0], True),
    "rounded above 0": ([99], [LOGPROB_SLACK / 2], True),
    "the first id beyond": ([0, 100], [-0.1, -0.1], False),
    "the largest number": ([2**32 - 1], [-0.1], False),
    "NaN last": ([5, 6], [-0.1, nan], False),
    "NaN first": ([5, 6], [nan, -0.1], False),
    "never sampled": ([5], [-inf], False),
    "never sampled, behind others": ([5, 6], [-0.1, -inf], False),
    "the bytes of minus infinity across two": (
        [5, 6],
        [1.4e-45, float(np.array([0xBF00FF80], "<u4").view("<f4")[0])],
        True,
    ),
    "certain": ([5, 6], [0.0, -0.0], True),
    "certain, behind minus infinity": ([5, 6], [-inf, 0.0], False),
    "NaN with a sign": ([5], [float(np.array([0xFFC00000], "<u4").view("<f4")[0])], False),
    "the least number": ([5], [float(np.finfo("<f4").min)], True),
    "infinite": ([5], [inf], False),
    "more than certain": ([5], [0.5], False),
}


@pytest.mark.parametrize(("ids", "logprobs", "able"), CASES.values(), ids=CASES)
def test_ids_are_below_the_vocabulary_and_logprobs_are_finite_and_no_more_than_0(
    ids: list[int], logprobs: list[float], able: bool
) -> None:
    assert can_be_sampled(pack_ids(ids), column(*logprobs), VOCABULARY) is able


def test_without_a_known_vocabulary_only_logprobs_are_checked() -> None:
    assert can_be_sampled(pack_ids([2**32 - 1]), column(-1.0), 0)
    assert not can_be_sampled(pack_ids([1]), column(nan), 0)


def frame(rows: list[tuple[int, int, int, int]], ids: list[int], *logprobs: float) -> Deltas:
    return Deltas(1, 0, rows=pack_rows(rows), ids=pack_ids(ids), logprobs=column(*logprobs))


POISON = {"id": ([VOCABULARY], (-1.0,)), "NaN": ([7], (nan,)), "above 0": ([7], (1.0,))}


@pytest.mark.parametrize(("ids", "logprobs"), POISON.values(), ids=POISON)
def test_one_such_token_costs_its_sample_a_move_and_its_engine_a_pause(
    ids: list[int], logprobs: tuple[float, ...]
) -> None:
    stage = Stage()
    stage.publish(0, vocabulary=VOCABULARY)
    stage.engine("a")
    stage.submit(n=2)
    rows = [(1, 0, 2, FINISH_CODES.index(None)), (2, 0, 1, FINISH_CODES.index("stop"))]
    stage.agent("a", frame(rows, [5, 6, *ids], -1.0, -1.0, *logprobs))
    state = stage.ledger.state
    assert bytes(state.samples["0.0"].ids) == pack_ids([5, 6]), "what others sent in the same frame counts"
    assert not state.samples["0.1"].ids
    assert state.samples["0.1"].phase is SamplePhase.WAITING
    assert state.samples["0.1"].avoid == "a"
    assert state.engines["a"].quarantined_until > stage.now
    assert state.counters.migrations["wrongTokens"] == 1
    assert msgspec.msgpack.encode(replay(LedgerConfig(run_epoch=1), stage.events)) == snapshot(stage.ledger)


def test_the_vocabulary_travels_with_the_version() -> None:
    where = WeightsRef(3, "tcp://p", public_key="key", manifest_hash=b"hash", content=b"same", vocabulary=VOCABULARY)
    read = decode_from_trainer(encode(PublishVersion.of(1, where)))
    assert isinstance(read, PublishVersion)
    assert read.weights == where
