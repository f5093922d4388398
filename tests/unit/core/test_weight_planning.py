"""Which form a version takes, and which versions stay."""

from __future__ import annotations

import random
from typing import Any

import pytest

from polyrl.weights.planning import ANCHOR_EVERY, VersionFacts, chain_of, plan_version, versions_kept

GB = 10**9
USUAL: dict[str, Any] = {
    "stream_bytes": 16 * GB,
    "chain": (),
    "delta_bytes": GB // 4,
    "density": 0.02,
    "encode_speed": 4e9,
    "hash_speed": 12e9,
    "bandwidth": 1.25e9,
    "stale": 4,
}
FAST: dict[str, Any] = {"stale": 16, "bandwidth": 12.5e9}
"""Many, behind a network that is faster than the codec."""


@pytest.mark.parametrize(
    ("changes", "is_delta", "sentence"),
    [
        pytest.param({}, True, "250.0 of 16000.0 MB, 2.00% of words; delta", id="usual"),
        pytest.param({"chain": None}, False, "no version of this layout", id="the first one"),
        pytest.param({"stream_bytes": 10**6}, False, "are small", id="small"),
        pytest.param({"chain": (1,) * (ANCHOR_EVERY - 2)}, True, "delta", id="the last before an anchor is due"),
        pytest.param({"chain": (1,) * (ANCHOR_EVERY - 1)}, False, "deltas since", id="an anchor is due"),
        pytest.param({"delta_bytes": 9 * GB}, False, "as long a way", id="half of all changed"),
        pytest.param({"chain": (4 * GB, 4 * GB)}, False, "as long a way", id="the chain has grown"),
        pytest.param({"chain": (4 * GB, 3 * GB)}, True, "delta", id="the chain may still grow"),
        pytest.param({"bandwidth": 1e12}, False, "anchor:", id="a network that is faster than the codec"),
        pytest.param({"encode_speed": 1e8}, False, "anchor:", id="a slow codec"),
        pytest.param({"stale": 1, "joiners": 40, "chain": (6 * GB,)}, False, "40 joining", id="all join"),
        pytest.param({"stale": 40, "joiners": 1, "chain": (6 * GB,)}, True, "1 joining", id="one joins"),
        pytest.param(FAST, True, "16 engines behind, 0 joining, 16 copies", id="each takes all from the publisher"),
        pytest.param(
            FAST | {"anchor_share": 2 / 16, "delta_share": 2 / 16},
            False,
            "16 engines behind, 0 joining, 2 copies",
            id="they give each other most of it",
        ),
        pytest.param(
            FAST | {"anchor_share": 2 / 16, "bandwidth": 1.25e9}, True, "16 copies", id="but not of small deltas"
        ),
        pytest.param(
            {"stale": 4, "anchor_share": 0.1, "bandwidth": 2e9}, True, "anchor 9.33 s", id="one copy at least"
        ),
        pytest.param(
            {"stale": 1, "joiners": 40, "chain": (6 * GB,), "anchor_share": 2 / 41, "delta_share": 2 / 41},
            False,
            "delta 42.7 s, anchor 26.9 s",
            id="all join, and give each other most of it",
        ),
    ],
)
def test_the_form_is_what_brings_it_to_all_sooner(changes: dict[str, Any], is_delta: bool, sentence: str) -> None:
    plan = plan_version(VersionFacts(**(USUAL | changes)))
    assert plan.is_delta == is_delta
    assert sentence in plan.reason


@pytest.mark.parametrize(
    ("changes", "chosen", "is_delta"),
    [
        pytest.param({"stream_bytes": 10**6, "delta_bytes": 10**5, "encode_speed": 1.0}, True, True, id="small, slow"),
        pytest.param({"delta_bytes": 9 * GB}, True, False, id="more than others can give to who joins"),
        pytest.param({"chain": (1,) * (ANCHOR_EVERY - 1)}, True, False, id="an anchor is due"),
        pytest.param({"chain": None}, True, False, id="the first one"),
        pytest.param({}, False, False, id="none wanted"),
    ],
)
def test_what_the_job_chooses_counts_within_the_bounds(changes: dict[str, Any], chosen: bool, is_delta: bool) -> None:
    assert plan_version(VersionFacts(**(USUAL | changes)), chosen=chosen).is_delta == is_delta


def test_kept_are_whole_chains_newest_first_within_the_bytes() -> None:
    for seed in range(300):
        dice = random.Random(seed)
        bases: dict[int, int | None] = {}
        for version in range(dice.randrange(1, 12)):
            bases[version] = version - 1 if version and dice.random() < 0.7 else None
        sizes = {version: 100 if base is None else dice.randrange(1, 40) for version, base in bases.items()}
        keep, most = dice.randrange(1, 5), dice.randrange(1, 500)
        kept = versions_kept(bases, sizes, keep, most)
        newest = max(bases)
        assert set(chain_of(newest, bases)) <= kept
        assert all(set(chain_of(version, bases)) <= kept for version in kept), "what is kept can be had"
        assert sum(sizes[version] for version in kept) <= max(most, sum(sizes[v] for v in chain_of(newest, bases)))
        wanted = [version for version in sorted(bases)[-keep:] if version not in kept]
        assert not wanted or sum(sizes[v] for v in kept | set(chain_of(max(wanted), bases))) > most


def test_where_one_does_not_fit_nothing_older_is_kept() -> None:
    bases, sizes = {0: None, 1: 0, 2: None, 3: 2}, {0: 100, 1: 5, 2: 100, 3: 5}
    assert versions_kept(bases, sizes, keep=4, max_bytes=207) == {2, 3}
    assert versions_kept(bases, sizes, keep=4, max_bytes=210) == {0, 1, 2, 3}
