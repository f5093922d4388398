"""A changed template: who makes way for it, and when."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.cluster.fleet.plan import outdated, to_replace
from polyrl.cluster.observation.rollouts import PodState
from polyrl.worker import Role

S, P, B = PodState.SERVING, PodState.PENDING, PodState.STARTING


def replaced(
    build: Any, old: str, new: str, *, boundary: bool | None, update: dict[str, Any] | None = None
) -> list[str]:
    """Of a desired fleet of 3; letters are states of pods with the old and with the new template."""
    ctx = build.ctx(build.job({"update": update or {}}))
    newest, states = ctx.hashes.templates[Role.ROLLOUT], {"s": S, "p": P, "b": B, "f": PodState.FAILED}
    fleet = [
        build.rollout(f"j-r-{number}", states[letter], template_hash=newest if number >= len(old) else "other")
        for number, letter in enumerate(old + new)
    ]
    return sorted(one.pod.name[-1] for one in to_replace(ctx, fleet, 3, boundary))


@pytest.mark.parametrize(
    ("old", "new", "boundary", "expected"),
    [
        pytest.param("spb", "", None, "", id="none for a template that nobody has agreed to"),
        pytest.param("", "sss", True, "", id="all new"),
        pytest.param("ssp", "", False, "2", id="a pod without a node goes at once"),
        pytest.param("ssb", "", False, "", id="amid a step nobody else goes"),
        pytest.param("sss", "", True, "2", id="one at a time, the youngest"),
        pytest.param("ss", "s", True, "1", id="new ones stay"),
        pytest.param("ss", "b", True, "", id="not while too few serve"),
        pytest.param("sb", "s", True, "1", id="one that starts serves nobody"),
        pytest.param("ssf", "", True, "", id="a failed one is no live one"),
    ],
)
def test_who_makes_way(build: Any, old: str, new: str, boundary: bool | None, expected: str) -> None:
    assert "".join(replaced(build, old, new, boundary=boundary)) == expected


def test_as_many_as_may_be_unavailable(build: Any) -> None:
    assert len(replaced(build, "sss", "", boundary=True, update={"maxUnavailable": 2})) == 2


def test_spot_where_the_policy_has_no_room_for_it_is_outdated(build: Any) -> None:
    ctx = build.ctx(build.job({"capacity": {"policy": "OnDemand"}}))
    fleet = [build.rollout(template_hash=ctx.hashes.templates[Role.ROLLOUT])]
    assert outdated(ctx, fleet, 1) == fleet
