"""When a status is written, and what is sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import JOB
from polyrl_operator.informer.cache import Cache, JobKey
from polyrl_operator.reconciler import reconciler
from polyrl_operator.reconciler.reconciler import PendingStatus, StatusWriter, merge_patch

KEY = JobKey("ns", "j")


values = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


def patched(old: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = patched(new.get(key), value)
    return new


@pytest.mark.slow
@given(objects, objects)
def test_a_patch_makes_the_one_into_the_other_and_is_empty_only_for_the_same(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    patch = merge_patch(old, new)
    assert patched(old, patch) == new
    assert bool(patch) == (old != new)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reconciler, "time", made)
    return made


class Store:
    """Plays the API server for one job's status."""

    def __init__(self) -> None:
        self.version, self.status, self.writes = 1, {}, 0
        self.refuses: list[ApiError] = []

    def raw(self) -> dict[str, Any]:
        metadata = {"name": "j", "namespace": "ns", "uid": "u", "resourceVersion": str(self.version)}
        return {"metadata": metadata, "spec": {}, "status": self.status}

    async def patch(self, kind: Any, namespace: str, name: str, body: dict[str, Any], sub: str) -> dict[str, Any]:
        if self.refuses:
            raise self.refuses.pop()
        assert body["metadata"]["resourceVersion"] == str(self.version)
        self.version, self.writes = self.version + 1, self.writes + 1
        self.status = self.status | {key: value for key, value in body["status"].items() if value is not None}
        return self.raw()

    async def get(self, *_: object) -> dict[str, Any]:
        self.version += 1
        return self.raw()


class Writing:
    """A status writer on a store."""

    def __init__(self) -> None:
        self.store, self.pending, self.woken = Store(), PendingStatus(), []
        self.cache = Cache(lambda key: None)
        self.cache.observe(JOB, self.store.raw())
        store: Any = self.store
        self.writer = StatusWriter(store, self.cache, lambda key, when: self.woken.append(when), lambda: None)

    async def decide(self, **status: Any) -> None:
        await self.writer.decided(KEY, self.pending, status)

    async def begin(self) -> dict[str, Any]:
        raw = self.cache.job(KEY)
        assert raw is not None
        return await self.writer.catch_up(KEY, raw, self.pending)


@pytest.fixture
def writing(clock: Clock) -> Writing:
    return Writing()


async def test_the_same_status_is_not_written_twice(writing: Writing) -> None:
    await writing.decide(state="Running")
    await writing.decide(state="Running")
    assert writing.store.writes == 1


async def test_plain_numbers_wait_and_are_shown_meanwhile(writing: Writing, clock: Clock) -> None:
    await writing.decide(state="Running", cost={"spotMicros": 1})
    clock.now = 1.0
    await writing.decide(state="Running", cost={"spotMicros": 2})
    assert writing.store.writes == 1
    assert writing.woken == [reconciler.STATUS_SPACING_S]
    assert (await writing.begin())["status"]["cost"] == {"spotMicros": 2}
    clock.now = reconciler.STATUS_SPACING_S
    await writing.decide(state="Running", cost={"spotMicros": 2})
    assert writing.store.writes == 2


@pytest.mark.parametrize(
    "weighty",
    [
        {"state": "Degraded"},
        {"rollout": {"preemptions": 1}},
        {"trainer": {"restarts": 1}},
        {"conditions": [{"type": "Disrupting", "status": "True"}]},
    ],
)
async def test_a_flip_or_a_count_is_written_at_once(writing: Writing, clock: Clock, weighty: dict[str, Any]) -> None:
    await writing.decide(state="Running")
    clock.now = 0.1
    await writing.decide(**{"state": "Running"} | weighty)
    assert writing.store.writes == 2


async def test_a_count_that_could_not_be_stored_is_stored_before_anything_else_is_decided(writing: Writing) -> None:
    writing.store.refuses = [ApiError(500, "", "etcd")]
    with pytest.raises(ApiError):
        await writing.decide(state="Running", rollout={"preemptions": 1})
    assert writing.store.writes == 0
    shown = await writing.begin()
    assert writing.store.writes == 1
    assert shown["status"]["rollout"] == {"preemptions": 1}


async def test_after_a_conflict_the_newest_job_is_read(writing: Writing) -> None:
    writing.store.refuses = [ApiError(409, "Conflict", "changed")]
    with pytest.raises(ApiError):
        await writing.decide(state="Running")
    await writing.begin()
    assert writing.store.status == {"state": "Running"}


async def test_a_job_that_is_gone_has_no_status(writing: Writing) -> None:
    writing.store.refuses = [ApiError(404, "NotFound", "gone")]
    await writing.decide(state="Running")
    assert writing.store.writes == 0
