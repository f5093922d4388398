"""pass@k against cases worked by hand, and against drawing all subsets."""

from __future__ import annotations

from itertools import combinations

import pytest

from polyrl.sample import Finish, Response, Scored
from polyrl_trainer.loops.pass_rates import has_passed, majority_rates, pass_at, pass_rates


@pytest.mark.parametrize(
    ("k", "answers", "passed", "rate"),
    [
        pytest.param(2, 4, 1, 0.5, id="one-of-four: 1 - C(3,2)/C(4,2) = 1 - 3/6"),
        pytest.param(2, 4, 2, 5 / 6, id="two-of-four: 1 - 1/6"),
        pytest.param(2, 4, 3, 1.0, id="no-pair-without-a-right-one"),
        pytest.param(4, 4, 0, 0.0, id="none"),
        pytest.param(1, 8, 3, 3 / 8, id="k=1-is-the-share"),
        pytest.param(512, 1024, 1, 0.5, id="large-numbers-do-not-overflow"),
    ],
)
def test_by_hand(k, answers, passed, rate):
    assert pass_at(k, answers, passed) == pytest.approx(rate)


@pytest.mark.parametrize("passed", range(7))
def test_it_is_the_share_of_all_draws_of_k_that_hold_one_that_passed(passed):
    answers = [place < passed for place in range(6)]
    for k in range(1, 7):
        draws = [any(draw) for draw in combinations(answers, k)]
        assert pass_at(k, 6, passed) == pytest.approx(sum(draws) / len(draws))


def test_which_k_are_measured():
    assert pass_rates([[True]]) == {}, "with one answer it is the mean"
    assert pass_rates([[True, False], [False, False]]) == {"pass@1": 0.25, "pass@2": 0.5, "avg@2": 0.25}
    assert list(pass_rates([[True] * 6])) == ["pass@1", "pass@2", "pass@4", "pass@6", "avg@6"]
    assert list(pass_rates([[True] * 8])) == ["pass@1", "pass@2", "pass@4", "pass@8", "avg@8"]


@pytest.mark.parametrize(
    ("reward", "metrics", "bar", "passes"),
    [
        pytest.param(0.5, {}, 0.5, True, id="at-the-manifests-bar"),
        pytest.param(0.4, {"exact_match": 1.0}, 0.5, False, id="below-it-whatever-is-named"),
        pytest.param(0.4, {"exact_match": 1.0}, None, True, id="the-reward-names-an-exact-match"),
        pytest.param(1.0, {"exact_match": 0.0}, None, False, id="and-there-is-none"),
        pytest.param(1.0, {"style": 0.0}, None, True, id="whole-reward"),
        pytest.param(0.9, {}, None, False, id="part-of-it"),
    ],
)
def test_what_passes(reward, metrics, bar, passes):
    response = Response("1.0", b"", b"", b"", (), turn=0, finish=Finish.STOP)
    assert has_passed(Scored(1, 0, response, reward, metrics=metrics), bar) == passes


A, B, C = 1.0, 2.0, 3.0
WON, LOST = (True, A), (False, B)


@pytest.mark.parametrize(
    ("votes", "rates"),
    [
        pytest.param([[WON, LOST, WON, LOST]], {"maj@2": 1.0, "maj@4": 1.0}, id="of equally many the first counts"),
        pytest.param([[LOST, WON, WON, WON]], {"maj@2": 0.5, "maj@4": 1.0}, id="each sample is in one vote"),
        pytest.param([[WON, LOST, LOST]], {"maj@2": 1.0, "maj@3": 0.0}, id="what is left over votes with all alone"),
        pytest.param([[(True, A), (False, B), (False, C), (True, A)]], {"maj@2": 0.5, "maj@4": 1.0}, id="a plurality"),
        pytest.param([[(False, None), (False, None), WON]], {"maj@2": 0.0, "maj@3": 1.0}, id="without one: no vote"),
        pytest.param([[WON, WON], [LOST, WON]], {"maj@2": 0.5}, id="the mean over prompts"),
        pytest.param([[(True, None)] * 4], {}, id="a reward that names no answers"),
        pytest.param([[WON]], {}, id="one sample"),
    ],
)
def test_a_majority_by_hand(votes, rates):
    assert majority_rates(votes) == rates


def test_the_mean_is_the_share_that_passed():
    assert pass_rates([[True, False, False], [True, True, False]])["avg@3"] == pytest.approx(0.5)
