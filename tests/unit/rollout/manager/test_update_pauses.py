"""What loads of weights cost engines, added up: of their own words, which may be anything."""

from __future__ import annotations

import math

import pytest

from polyrl.wire import WeightsLoaded
from polyrl_rollout.manager.metrics import UpdatePauses


def loaded(wait: float, load: float, verify: float, pull: float = 9.0) -> WeightsLoaded:
    return WeightsLoaded(1, pull, load_seconds=load, bytes_pulled=1, wait_seconds=wait, verify_seconds=verify)


def test_parts_of_pauses_add_up() -> None:
    pauses = UpdatePauses()
    pauses.take(loaded(0.5, 2.0, 0.25))
    pauses.take(loaded(0.0, 1.0, 0.0))
    assert (pauses.updates, pauses.seconds) == (2, {"wait": 0.5, "load": 3.0, "verify": 0.25})
    assert pauses.pulled == 18.0, "beside which engines go on"


@pytest.mark.parametrize("word", [math.nan, math.inf, -1.0, 1e9])
@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_what_cannot_be_counts_nothing(word: float, part: int) -> None:
    pauses, parts = UpdatePauses(), [1.0, 1.0, 1.0, 1.0]
    parts[part] = word
    pauses.take(loaded(*parts))
    assert (pauses.updates, sum(pauses.seconds.values()), pauses.pulled) == (0, 0.0, 0.0)


def test_a_version_that_is_served_already_is_no_load() -> None:
    pauses = UpdatePauses()
    pauses.take(loaded(0.0, 0.0, 0.0, pull=0.0))
    assert pauses.updates == 0
