"""Who may read the operator's metrics, which name all tenants' jobs: whoever has a token that the API server knows
(TokenReview) and that may `get` the path /metrics (SubjectAccessReview), as for the control plane's own metrics.

The API server's word is kept for KEPT_S, so that a scrape costs it nothing; a right that is taken away lasts as long.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import structlog

from polyrl.cluster.actions import Object
from polyrl_operator.api.client import ApiError
from polyrl_operator.api.kinds import ACCESS_REVIEW, TOKEN_REVIEW, ResourceKind

METRICS_PATH: Final = "/metrics"
KEPT_S: Final = 60.0
"""Two scrapes of Prometheus."""
MAX_KEPT: Final = 256
"""Answers that are kept; strangers' tokens push out the oldest."""
REVIEWS: Final = 4
"""Tokens that are reviewed at once: strangers must not make the operator a load on its API server."""
SCHEME: Final = "Bearer "

OK, UNAUTHORIZED, FORBIDDEN, UNAVAILABLE = 200, 401, 403, 503

log = structlog.get_logger(__name__)


class Reviews(Protocol):
    """The part of the API server's client that is needed."""

    async def create(self, item: Object) -> Object: ...


class MetricsReaders:
    """`status` is asked once per request."""

    def __init__(self, reviews: Reviews, now: Callable[[], float] = time.monotonic) -> None:
        self._reviews, self._now = reviews, now
        self._kept: dict[bytes, tuple[int, float]] = {}
        self._at_once = asyncio.Semaphore(REVIEWS)

    async def status(self, authorization: str) -> int:
        """HTTP status for a request with this Authorization header: 200, 401, 403; 503 while nobody can tell."""
        if not authorization.startswith(SCHEME):
            return UNAUTHORIZED
        token = authorization.removeprefix(SCHEME)
        # The token itself is not kept.
        digest = hashlib.sha256(token.encode()).digest()
        status, until = self._kept.get(digest, (0, 0.0))
        if self._now() < until:
            return status
        try:
            async with self._at_once:
                status = await self._reviewed(token)
        except ApiError as error:
            log.warning("whether metrics may be read cannot be asked", error=str(error))
            return UNAVAILABLE
        self._keep(digest, status)
        return status

    def _keep(self, digest: bytes, status: int) -> None:
        self._kept.pop(digest, None)
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[digest] = status, self._now() + KEPT_S

    async def _reviewed(self, token: str) -> int:
        known = await self._review(TOKEN_REVIEW, token=token)
        if not known.get("authenticated"):
            return UNAUTHORIZED
        user = {"username": "user", "uid": "uid", "groups": "groups", "extra": "extra"}
        who = {theirs: known["user"][ours] for ours, theirs in user.items() if ours in known["user"]}
        asked = await self._review(ACCESS_REVIEW, nonResourceAttributes={"path": METRICS_PATH, "verb": "get"}, **who)
        return OK if asked.get("allowed") else FORBIDDEN

    async def _review(self, kind: ResourceKind, **spec: Any) -> Object:
        review = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {}, "spec": spec}
        status: Object = (await self._reviews.create(review)).get("status", {})
        return status
