"""Which samples on which rank: everything once, everybody as often, and nobody much longer than the others."""

from __future__ import annotations

from hypothesis import given, strategies as st

from polyrl_trainer.backends.fsdp.rounds import EMPTY, plan_rounds
from polyrl_trainer.backends.packing import PackingPolicy

POLICY = PackingPolicy.dense(128)
HIDDEN = 32


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 8))
def test_every_sample_is_in_one_pass_of_one_rank(lengths: list[int], ranks: int) -> None:
    rounds = plan_rounds(lengths, POLICY, ranks, hidden_size=HIDDEN)
    assert all(len(one) == ranks for one in rounds)
    assert sorted(index for one in rounds for each in one for row in each.rows for index in row) == list(
        range(len(lengths))
    )
    assert all(any(each != EMPTY for each in one) for one in rounds), "a round in which nobody does anything"


def test_pairs_stay_together_on_one_rank() -> None:
    rounds = plan_rounds([9, 3, 20, 8, 5, 5], POLICY, 2, hidden_size=HIDDEN, together=2)
    rows = [row for one in rounds for each in one for row in each.rows]
    assert all(row[place] + 1 == row[place + 1] for row in rows for place in range(0, len(row), 2))


def test_the_load_is_shared_by_what_attention_costs() -> None:
    # One long sequence costs as much as all the short ones: 64 (1 + 64 / 192) = 85.3 against 10 x 8 (1 + 8 / 192).
    rounds = plan_rounds([64, *[8] * 10], POLICY, 2, hidden_size=HIDDEN)
    assert sorted(sum(len(row) for one in rounds for row in one[rank].rows) for rank in (0, 1)) == [1, 10]


def test_fewer_samples_than_ranks_leave_empty_passes() -> None:
    (one,) = plan_rounds([4, 4], POLICY, 4, hidden_size=HIDDEN)
    assert sum(each == EMPTY for each in one) == 2
