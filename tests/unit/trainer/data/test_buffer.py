"""DataBuffer: the order depends on seed and draws alone, shares are exact, and a restored buffer goes on exactly."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from polyrl.errors import InvalidData
from polyrl_trainer.data.buffer import DataBuffer

sources = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(
    lambda sizes: [[(source, row) for row in range(size)] for source, size in enumerate(sizes)]
)
seeds = st.integers(0, 2**31 - 1)


@given(sources, seeds, st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_resumed_stream_equals_undisturbed_stream(rows, seed, before, after, shuffle):
    weights = [1.0 + index for index in range(len(rows))]
    undisturbed = DataBuffer(rows, weights, seed=seed, shuffle=shuffle)
    expected = [draw.item for draw in undisturbed.get(before + after)]
    first = DataBuffer(rows, weights, seed=seed, shuffle=shuffle)
    seen = [draw.item for draw in first.get(before)]
    second = DataBuffer(rows, weights, seed=seed, shuffle=shuffle)
    second.restore(json.loads(json.dumps(first.state())))
    assert seen + [draw.item for draw in second.get(after)] == expected


@given(st.integers(1, 20), seeds, st.integers(1, 3))
def test_each_epoch_holds_each_row_once(size, seed, epochs):
    buffer = DataBuffer([list(range(size))], [1.0], seed=seed)
    for _ in range(epochs):
        assert sorted(draw.item for draw in buffer.get(size)) == list(range(size))
    assert buffer.epochs() == epochs


def test_what_was_not_used_does_not_count_as_a_pass():
    buffer = DataBuffer([list(range(4)), list(range(10))], [1.0, 1.0], seed=1)
    draws = buffer.get(8)
    assert buffer.epochs() == 0.5 * 4 / 4 + 0.5 * 4 / 10
    buffer.put(draws[6:])
    assert buffer.epochs(draws[4:6]) == pytest.approx(0.5 * 2 / 4 + 0.5 * 2 / 10)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 60), seeds)
def test_shares_are_exact_at_every_moment(weights, draws, seed):
    buffer = DataBuffer([[index] for index in range(len(weights))], weights, seed=seed)
    counts = Counter(draw.item for draw in buffer.get(draws))
    for index, weight in enumerate(weights):
        assert abs(counts[index] - draws * weight / sum(weights)) < len(weights)


@given(sources, seeds, st.integers(1, 20), st.data())
def test_what_is_put_back_comes_first_and_survives_a_restart(rows, seed, count, data):
    buffer = DataBuffer(rows, [1.0] * len(rows), seed=seed)
    drawn = buffer.get(count)
    unused = data.draw(st.lists(st.sampled_from(drawn), unique_by=id, max_size=count))
    buffer.put(unused)
    restored = DataBuffer(rows, [1.0] * len(rows), seed=seed)
    restored.restore(json.loads(json.dumps(buffer.state())))
    assert restored.get(len(unused)) == unused
    assert buffer.get(len(unused) + 5)[len(unused) :] == restored.get(5)


def test_a_source_without_weight_is_never_drawn():
    buffer = DataBuffer([["a"], ["b"]], [0.0, 1.0], seed=0)
    assert {draw.item for draw in buffer.get(10)} == {"b"}


def test_different_seeds_shuffle_differently():
    orders = {tuple(draw.item for draw in DataBuffer([list(range(20))], [1.0], seed=seed).get(20)) for seed in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize(
    ("rows", "weights", "seed", "fault"),
    [
        ([list("abcd")], [1.0], 0, "rows"),
        ([list("abc")], [1.0], 1, "seed"),
        ([list("abc"), list("de")], [1.0, 3.0], 0, "rows"),
    ],
    ids=["another row", "another seed", "another file"],
)
def test_a_cursor_of_other_data_is_refused(rows, weights, seed, fault):
    state = DataBuffer([list("abc")], [1.0], seed=0).state()
    with pytest.raises(InvalidData, match=f"data cursor has {fault}"):
        DataBuffer(rows, weights, seed=seed).restore(state)


def test_a_cursor_of_rows_with_another_content_is_refused():
    made = DataBuffer([list("abc")], [1.0], seed=0, files=[("a.jsonl", "as it was")])
    made.restore(made.state())
    with pytest.raises(InvalidData, match=r"^a.jsonl: its 3 rows are not the 3 that"):
        DataBuffer([list("abx")], [1.0], seed=0, files=[("a.jsonl", "edited")]).restore(made.state())


def test_the_file_whose_rows_have_changed_is_named():
    state = DataBuffer(
        [list("abc"), list("de")], [1.0, 1.0], seed=0, files=[("first.jsonl", "1"), ("second.jsonl", "2")]
    ).state()
    grown = DataBuffer(
        [list("abc"), list("def")], [1.0, 1.0], seed=0, files=[("first.jsonl", "1"), ("second.jsonl", "3")]
    )
    with pytest.raises(
        InvalidData, match=r"^second\.jsonl: its 3 rows are not the 2 that the checkpoint was saved over;"
    ):
        grown.restore(state)


def test_no_rows_at_all_are_refused():
    with pytest.raises(InvalidData, match="no data file"):
        DataBuffer([[]], [1.0], seed=0)
