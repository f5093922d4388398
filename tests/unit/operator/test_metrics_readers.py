"""Who may read metrics, by what the API server says, and how often it is asked."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl_operator.api.client import ApiError
from polyrl_operator.metrics_readers import KEPT_S, MAX_KEPT, MetricsReaders

USER = {"username": "prometheus", "uid": "7", "groups": ["a"], "extra": {"x": ["y"]}}


class ApiServer:
    """Knows the tokens `good` and `poor`, and lets the user of `good` read."""

    def __init__(self) -> None:
        self.reviews: list[dict[str, Any]] = []
        self.away = False

    async def create(self, item: dict[str, Any]) -> dict[str, Any]:
        if self.away:
            raise ApiError(0, "Unreachable", "away")
        self.reviews.append(item)
        spec = item["spec"]
        if item["kind"] == "TokenReview":
            known = spec["token"] in ("good", "poor")
            user = USER | {"username": spec["token"]}
            return {"status": {"authenticated": True, "user": user} if known else {"error": "unknown"}}
        return {"status": {"allowed": spec["user"] == "good"}}


@pytest.mark.parametrize(
    ("header", "status", "reviews"),
    [
        pytest.param("", 401, 0, id="nothing"),
        pytest.param("Basic good", 401, 0, id="another scheme"),
        pytest.param("Bearer bad", 401, 1, id="unknown"),
        pytest.param("Bearer poor", 403, 2, id="known, without the right"),
        pytest.param("Bearer good", 200, 2, id="with the right"),
    ],
)
async def test_who_may_read(header: str, status: int, reviews: int) -> None:
    server = ApiServer()
    assert await MetricsReaders(server).status(header) == status
    assert len(server.reviews) == reviews


async def test_the_api_server_is_asked_about_the_user_that_it_named() -> None:
    server = ApiServer()
    await MetricsReaders(server).status("Bearer good")
    asked = {key: server.reviews[1][key] for key in ("apiVersion", "kind", "spec")}
    path = {"path": "/metrics", "verb": "get"}
    who = {"user": "good", "uid": "7", "groups": ["a"], "extra": {"x": ["y"]}}
    assert asked == {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"nonResourceAttributes": path, **who},
    }


async def test_answers_count_for_a_while_and_a_server_that_is_away_is_no_answer() -> None:
    server, now = ApiServer(), [0.0]
    readers = MetricsReaders(server, lambda: now[0])
    assert [await readers.status("Bearer good") for _ in range(3)] == [200] * 3
    assert len(server.reviews) == 2
    server.away = True
    now[0] = KEPT_S - 0.1
    assert await readers.status("Bearer good") == 200
    now[0] = KEPT_S
    assert await readers.status("Bearer good") == 503
    server.away = False
    assert await readers.status("Bearer good") == 200
    assert len(server.reviews) == 4


async def test_strangers_tokens_fill_no_memory() -> None:
    readers = MetricsReaders(ApiServer())
    for number in range(MAX_KEPT + 50):
        assert await readers.status(f"Bearer {number}") == 401
    assert len(readers._kept) == MAX_KEPT
