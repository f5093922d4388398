"""The packing plan: every sequence once, within the budget, little padding, whatever the lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from polyrl_trainer.backends.models.sequence_slices import SequenceSlices
from polyrl_trainer.backends.packing import (
    MAX_PADDING,
    PackingPolicy,
    Pass,
    learned_counts,
    pack_pass,
    plan_passes,
)
from polyrl_trainer.sample import Sample

BUDGET = 4096

policies = st.builds(
    lambda dense, budget: (PackingPolicy.dense if dense else PackingPolicy.variable_length)(budget),
    st.booleans(),
    st.integers(1, 600),
)


def used_tokens(one: Pass, lengths: list[int]) -> int:
    return sum(lengths[index] for row in one.rows for index in row)


def num_positions(one: Pass) -> int:
    return len(one.rows) * one.width


def padding_fraction(passes: list[Pass], lengths: list[int]) -> float:
    """Share of all positions that hold no token."""
    positions = sum(num_positions(one) for one in passes)
    return 1 - sum(used_tokens(one, lengths) for one in passes) / positions if positions else 0.0


@given(st.lists(st.integers(1, 400), max_size=80), policies)
def test_every_plan_is_whole_tight_and_within_budget(lengths: list[int], policy: PackingPolicy) -> None:
    passes = plan_passes(lengths, policy)
    placed = [index for one in passes for row in one.rows for index in row]
    assert sorted(placed) == list(range(len(lengths)))
    for one in passes:
        sizes = [sum(lengths[index] for index in row) for row in one.rows]
        assert one.width == max(sizes)
        assert num_positions(one) - used_tokens(one, lengths) <= MAX_PADDING * num_positions(one)
        lone = len(one.rows) == 1 and len(one.rows[0]) == 1
        assert num_positions(one) <= policy.max_tokens or lone
        assert not policy.one_row or len(one.rows) == 1
    assert padding_fraction(passes, lengths) <= MAX_PADDING


@given(st.lists(st.integers(1, 400), max_size=40), policies)
def test_a_plan_is_deterministic(lengths: list[int], policy: PackingPolicy) -> None:
    assert plan_passes(lengths, policy) == plan_passes(list(lengths), policy)


@given(st.lists(st.integers(1, 400), max_size=40), st.integers(2, 3), policies)
def test_what_stays_together_is_side_by_side_in_one_row(
    lengths: list[int], together: int, policy: PackingPolicy
) -> None:
    lengths = lengths[: len(lengths) // together * together]
    passes = plan_passes(lengths, policy, together)
    rows = [row for one in passes for row in one.rows]
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        for first in range(0, len(row), together):
            assert row[first] % together == 0
            assert row[first : first + together] == tuple(range(row[first], row[first] + together))
    assert padding_fraction(passes, lengths) <= MAX_PADDING


def test_a_pair_without_its_other_half_is_refused() -> None:
    with pytest.raises(ValueError, match="3 sequences cannot be taken 2 at a time"):
        plan_passes([1, 2, 3], PackingPolicy.dense(64), together=2)


def lognormal(seed: int, count: int, median: float, sigma: float) -> list[int]:
    draw = np.random.default_rng(seed)
    return [int(length) for length in np.clip(draw.lognormal(np.log(median), sigma, count), 1, BUDGET)]


@pytest.mark.parametrize(
    ("lengths", "most_passes"),
    [
        pytest.param([17] * 256, 2, id="256 samples of 17 tokens"),
        pytest.param([int(n) for n in np.random.default_rng(1).integers(14, 21, 256)], 2, id="256 of about 17"),
        pytest.param(lognormal(2, 256, median=40, sigma=0.6), 24, id="lognormal, short"),
        pytest.param(lognormal(3, 256, median=300, sigma=0.8), 64, id="lognormal, long"),
        pytest.param([8] * 200 + [4000], 2, id="one giant among dwarfs"),
    ],
)
def test_realistic_lengths_waste_less_than_a_tenth(lengths: list[int], most_passes: int) -> None:
    dense = plan_passes(lengths, PackingPolicy.dense(BUDGET))
    assert padding_fraction(dense, lengths) < 0.10
    long_rows = plan_passes(lengths, PackingPolicy.variable_length(BUDGET))
    assert padding_fraction(long_rows, lengths) == 0.0
    # Packing must not buy little padding with a pass per sample, and long rows must fill the budget.
    assert len(dense) <= most_passes + sum(lengths) // BUDGET
    assert len(long_rows) <= 1 + 1.25 * sum(lengths) / BUDGET


def test_no_sequences_no_passes() -> None:
    assert plan_passes([], PackingPolicy.dense(BUDGET)) == []


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        plan_passes([3, 0], PackingPolicy.dense(BUDGET))


def sample_of(length: int) -> Sample:
    mask = np.array([0] + [1] * (length - 1), np.float32)
    return Sample(np.arange(length), mask, prompt_length=1)


@pytest.mark.parametrize(
    ("rows", "positions"),
    [
        pytest.param(((0,), (1,)), [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], id="one-sequence-a-row: nothing restarts"),
        pytest.param(((0,), (2, 3)), [[0, 1, 2, 3, 4], [0, 1, 0, 1, 0]], id="two-in-a-row: all restart"),
    ],
)
def test_positions_restart_only_where_a_mask_is_needed(rows: tuple[tuple[int, ...], ...], positions: object) -> None:
    samples = [sample_of(length) for length in (5, 4, 2, 2)]
    packed = pack_pass(samples, Pass(rows, width=5), torch.device("cpu"))
    assert packed.position_ids.tolist() == positions


@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(1, 8), st.integers(0, 9))
def test_slices_of_a_pass_have_all_of_it_once(lengths: list[int], number: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    samples = [
        Sample(draw.integers(0, 99, length), np.r_[0, draw.integers(0, 2, length - 1)].astype(np.float32), 1)
        for length in lengths
    ]
    for one in plan_passes(lengths, PackingPolicy.variable_length(64, number)):
        whole = pack_pass(samples, one, torch.device("cpu"))
        group: Any = None
        parts = [whole.slice(SequenceSlices(group, number, own)) for own in range(number)]
        for name in ("input_ids", "position_ids"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name))
        assert len({part.input_ids.shape for part in parts}) == 1
        for name in ("targets", "sequence"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
        width = one.width // number
        placed = torch.cat([part.predicting + own * width for own, part in enumerate(parts)])
        assert torch.equal(placed, whole.predicting)
        assert learned_counts(samples, one, number) == [len(part.targets) for part in parts]
        assert all(part.documents.starts is whole.documents.starts for part in parts)


def test_a_pass_without_rows_has_nothing_to_learn() -> None:
    assert learned_counts([], Pass((), 0), 3) == [0, 0, 0]
