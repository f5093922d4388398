"""A manager's certificate is replaced while days of it are left, whatever an operator sleeps through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from polyrl.cluster.actions import RenewCertificate
from polyrl.cluster.fleet.certificate import LIFE_S, RENEWAL_RETRY_S, renewal
from polyrl.cluster.observation.facts import ChildFacts

DAY_S = 86_400.0
SECRET = ChildFacts("Secret", "j-keys-manager", uid="uid", content_hash="")


def decided(build: Any, expires_at: float | None, now: float, tried_at: float | None = None) -> Any:
    ctx = build.ctx(children=(replace(SECRET, expires_at=expires_at),))
    return renewal(replace(ctx, now=now, state=replace(ctx.state, renewal_tried_at=tried_at)))


@pytest.mark.parametrize(
    ("left_days", "tried_s_ago", "renews"),
    [
        pytest.param(14.0, None, False, id="fresh"),
        pytest.param(7.1, None, False, id="before half its life"),
        pytest.param(6.9, None, True, id="after half its life"),
        pytest.param(-3.0, None, True, id="ended while no operator ran"),
        pytest.param(None, None, True, id="nobody knows when it ends"),
        pytest.param(40.0, None, True, id="made by a clock that ran ahead"),
        pytest.param(6.9, 60.0, False, id="just refused"),
        pytest.param(6.9, RENEWAL_RETRY_S, True, id="refused an hour ago"),
        pytest.param(6.9, -60.0, True, id="the clock went back"),
    ],
)
def test_renewal(build: Any, left_days: float | None, tried_s_ago: float | None, renews: bool) -> None:
    now = build.now
    expires_at = None if left_days is None else now + left_days * DAY_S
    actions, due = decided(build, expires_at, now, None if tried_s_ago is None else now - tried_s_ago)
    assert [type(one) for one in actions] == [RenewCertificate] * renews
    assert due is not None
    assert due > now, "time alone asks for the next one"
    if renews:
        assert (actions[0].name, actions[0].uid, actions[0].root) == ("j-keys-manager", "uid", "j-keys")


def test_no_secret_is_renewed_that_is_not_there(build: Any) -> None:
    assert renewal(build.ctx()) == ([], None)
    assert renewal(build.ctx(children=(replace(SECRET, deleting=True),))) == ([], None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(gaps=st.lists(st.tuples(st.floats(1.0, 3 * DAY_S), st.booleans()), max_size=15))
def test_days_are_always_left(build: Any, gaps: list[tuple[float, bool]]) -> None:
    """Between reconciles up to three days pass, and an attempt that is refused is followed by one within the hour."""
    now = build.now
    expires_at, tried_at, least = now + LIFE_S, None, LIFE_S
    for gap, refused in gaps:
        _, due = decided(build, expires_at, now, tried_at)
        if tried_at is not None:
            assert due <= max(now, tried_at + RENEWAL_RETRY_S, expires_at - LIFE_S / 2) + RENEWAL_RETRY_S
        now += gap
        least = min(least, expires_at - now)
        actions, due = decided(build, expires_at, now, tried_at)
        if actions and refused:
            tried_at, now = now, due
            actions, _ = decided(build, expires_at, now, tried_at)
        if actions:
            tried_at, expires_at = now, actions[0].now + LIFE_S
        assert expires_at - now > LIFE_S / 2 - RENEWAL_RETRY_S
    assert least >= 4 * DAY_S - RENEWAL_RETRY_S
