"""a + b / n from what the manager reports and from what was seen."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.scaling.step_model import USUAL_STEPS, StepModel, fit_steps, is_measure, measures
from polyrl.ledger.measures.usage import STEPS_PER_SIZE

SHAPE = StepModel(40.0, 240.0)


@pytest.mark.parametrize(
    ("sizes", "reported", "within"),
    [
        pytest.param([8], 1.0, 0.0, id="one step: as reported"),
        pytest.param([8], 0.7, 0.3, id="one step: as wrong as reported"),
        pytest.param([8] * 4, 0.7, 0.3, id="of one size it stays so"),
        pytest.param([4, 8, 16], 3.0, 0.2, id="what was seen overrules what was reported"),
        pytest.param([4, 8, 16], 0.5, 0.3, id="in both directions"),
        pytest.param([2, 3, 4, 4], 1.5, 0.1, id="sizes close by, where b is most of the step"),
    ],
)
def test_b_is_found(build: Any, sizes: list[int], reported: float, within: float) -> None:
    """`reported`, `within`: parts of the true b."""
    steps = [
        build.step(number, size, rollout_s=SHAPE.seconds(size), train_s=20.0, shared_s=reported * SHAPE.shared_s)
        for number, size in enumerate(sizes)
    ]
    model = fit_steps(steps)
    assert model.shared_s == pytest.approx(SHAPE.shared_s, rel=within + 0.01)
    assert model.through(steps[-1]).seconds(sizes[-1]) == pytest.approx(steps[-1].rollout_seconds)


@pytest.mark.parametrize(
    ("sizes", "growth"),
    [
        pytest.param(range(4, 12), 0.03, id="a fleet grows with its answers"),
        pytest.param(range(11, 3, -1), -0.015, id="it shrinks with them"),
    ],
)
def test_answers_that_grow_do_not_hide_what_engines_gain(build: Any, sizes: range, growth: float) -> None:
    """Four steps of each size. b was 0: with more engines steps took longer."""
    steps = []
    for number, size in enumerate(size for size in sizes for _ in range(4)):
        longer = 1 + growth * number
        rollout_s, shared_s = SHAPE.seconds(size) * longer, SHAPE.shared_s * longer
        steps.append(build.step(number, size, rollout_s=rollout_s, train_s=20.0, shared_s=shared_s))
    assert fit_steps(steps).through(steps[-1]).shared_s == pytest.approx(shared_s, rel=0.5)


def test_a_step_that_is_unlike_the_others_counts_little(build: Any) -> None:
    """The only one of 16 engines had an answer four times as long: b was 0, for 16 took longer than 12."""
    sizes = [4, 4, 8, 8, 12, 12, 16]
    steps = [
        build.step(n, size, rollout_s=SHAPE.seconds(size), train_s=20.0, shared_s=SHAPE.shared_s)
        for n, size in enumerate(sizes)
    ]
    steps[-1] = build.step(7, 16, rollout_s=160.0 + 15.0, train_s=20.0, shared_s=SHAPE.shared_s)
    assert fit_steps(steps).shared_s == pytest.approx(SHAPE.shared_s, rel=0.2)
    assert StepModel(40.0, 240.0).through(*steps[-5:]).seconds(4) == pytest.approx(SHAPE.seconds(4))


def test_steps_of_long_ago_do_not_count(build: Any) -> None:
    before = [build.step(n, n, rollout_s=10.0, train_s=20.0, shared_s=240.0) for n in (2, 4, 6, 8)]
    now = [build.step(n, 8, rollout_s=SHAPE.seconds(8), train_s=20.0, shared_s=240.0) for n in range(30, 34)]
    assert fit_steps(measures(before + now)).shared_s == pytest.approx(240.0)
    assert fit_steps(before + now).shared_s < 100.0


def test_a_fleet_at_rest_has_its_newest_steps_kept() -> None:
    """With fewer of one size the median was also of steps of long ago, when the fleet had another."""
    assert STEPS_PER_SIZE >= USUAL_STEPS


def test_neither_part_is_below_zero(build: Any) -> None:
    grows = [build.step(n, n, rollout_s=10.0 * n, train_s=20.0, shared_s=0.0) for n in (2, 4, 8)]
    falls = [build.step(n, n, rollout_s=100.0 / n**2, train_s=20.0) for n in (2, 4, 8)]
    assert fit_steps(grows).shared_s == 0.0
    assert fit_steps(falls).fixed_s == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("engines", "more", "expected"),
    [
        pytest.param(4.0, {}, True, id="any step"),
        pytest.param(0.0, {}, False, id="without an engine"),
        pytest.param(4.0, {"steady": False}, False, id="polluted"),
        pytest.param(4.0, {"rollout_s": 0.0}, False, id="that generated nothing"),
    ],
)
def test_what_is_a_measure(build: Any, engines: float, more: dict[str, Any], expected: bool) -> None:
    assert is_measure(build.step(1, engines, **{"rollout_s": 30.0, "train_s": 20.0} | more)) == expected
