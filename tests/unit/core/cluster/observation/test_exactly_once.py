"""Each lost pod once: numbers, and the counter that follows them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from polyrl.cluster import names
from polyrl.cluster.observation.exactly_once import (
    LossCounter,
    LossNumber,
    assign_numbers,
    loss_number_of,
    newly_counted,
    total,
)
from polyrl.cluster.observation.facts import PodFacts, PodPhase
from polyrl.cluster.state import LastSeenPod
from polyrl.worker import Role


def marked(number: int | None, counter: str = "preemption") -> PodFacts:
    written = {} if number is None else {names.ANNOTATION_COUNTED: f"{counter}-{number}"}
    return PodFacts(
        f"p-{number}", f"u-{number}", role=Role.ROLLOUT, phase=PodPhase.FAILED, created_at=0.0, annotations=written
    )


@pytest.mark.parametrize(
    ("written", "read"),
    [
        pytest.param("preemption-7", LossNumber(LossCounter.PREEMPTION, 7), id="a preemption"),
        pytest.param("failure-1", LossNumber(LossCounter.FAILURE, 1), id="a failure"),
        pytest.param("disruption-2", LossNumber(LossCounter.DISRUPTION, 2), id="a disruption"),
        pytest.param("preemption-", None, id="no number"),
        pytest.param("preemption-x", None, id="not a number"),
        pytest.param(f"preemption-{'9' * 5000}", None, id="a number that Python does not read"),
        pytest.param("theft-3", None, id="another counter"),
        pytest.param("", None, id="no mark"),
    ],
)
def test_mark(build: Any, written: str, read: LossNumber | None) -> None:
    assert loss_number_of(build.pod(annotations={names.ANNOTATION_COUNTED: written})) == read
    if read is not None:
        assert str(read) == written


def test_of_the_other_counter_nothing_is_known() -> None:
    pods = [marked(4), marked(9, "failure"), marked(None)]
    assert [pod.name for pod in newly_counted(pods, LossCounter.PREEMPTION, 3)] == ["p-4"]
    assert newly_counted(pods, LossCounter.PREEMPTION, 4) == []
    assert total(pods, LossCounter.PREEMPTION, 3) == 4
    assert total(pods, LossCounter.FAILURE, 3) == 9


def gone(mark: str = "") -> LastSeenPod:
    return LastSeenPod("p", Role.ROLLOUT, pool=None, node="n", settled=False, runs_since=0.0, loss_number=mark)


@pytest.mark.parametrize(
    ("marks", "preemptions", "failures"),
    [
        pytest.param([""], 4, 5, id="one without a number"),
        pytest.param(["", ""], 5, 5, id="two without"),
        pytest.param(["preemption-4"], 4, 5, id="a preemption"),
        pytest.param(["failure-6"], 3, 6, id="a failure"),
        pytest.param(["preemption-4", ""], 5, 5, id="one with and one without"),
    ],
)
def test_of_the_vanished_each_has_its_number_or_gets_one(marks: list[str], preemptions: int, failures: int) -> None:
    vanished = [gone(mark) for mark in marks]
    assert total([], LossCounter.PREEMPTION, 3, vanished) == preemptions
    assert total([], LossCounter.FAILURE, 5, vanished) == failures


@pytest.mark.parametrize(
    ("uids", "reached", "seen", "given_to"),
    [
        pytest.param(["a", "b"], 3, {}, ["failure-4", "failure-5"], id="new ones"),
        pytest.param(["a", "b"], 3, {"a": "failure-4"}, ["failure-4", "failure-5"], id="one was numbered"),
        pytest.param(
            ["a", "b"],
            5,
            {"a": "failure-4", "b": "failure-5"},
            ["failure-4", "failure-5"],
            id="reached by b's, with a's",
        ),
        pytest.param(["b"], 3, {"a": "failure-4"}, ["failure-5"], id="a's may be on its way"),
        pytest.param(["a"], 3, {"a": "preemption-9"}, ["preemption-9"], id="it has been counted as that"),
        pytest.param(["b"], 3, {"a": "preemption-9"}, ["failure-4"], id="and moves nobody else's"),
        pytest.param(["a"], 3, {"a": ""}, ["failure-4"], id="seen without a number"),
    ],
)
def test_a_pod_keeps_the_number_that_it_was_given(
    uids: list[str], reached: int, seen: dict[str, str], given_to: list[str]
) -> None:
    before = {uid: gone(mark) for uid, mark in seen.items()}
    assert [str(mark) for mark in assign_numbers(uids, LossCounter.FAILURE, reached, before).values()] == given_to


@given(
    losses=st.lists(st.sampled_from(["marked", "vanished"]), max_size=30),
    reconciles=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    forgets=st.sets(st.integers(0, 29)),
)
def test_every_loss_is_counted_once_however_reconciles_fall(
    losses: list[str], reconciles: list[int], forgets: set[int]
) -> None:
    """Pods are numbered, read back, stored and deleted in reconciles that see some of them each; some store nothing,
    as an operator does that dies after it annotated."""
    stored, there, waiting = 0, list[PodFacts](), list(losses)
    for number, many in enumerate([*reconciles, *[30] * 4]):
        arrived, waiting = waiting[:many], waiting[many:]
        went = [gone()] * arrived.count("vanished")
        counter = total(there, LossCounter.PREEMPTION, stored, went)
        there += [marked(counter + 1 + place) for place in range(arrived.count("marked"))]
        if number in forgets and number < len(reconciles) and not went:
            continue
        stored = counter
        there = [pod for pod in there if (mark := loss_number_of(pod)) is None or mark.number > stored]
    assert stored == len(losses)
