"""When everything is listed anew after a resync that failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from polyrl_operator.api.client import ApiError
from polyrl_operator.informer import resync
from polyrl_operator.informer.cache import Cache


class BusyServer:
    """Plays a `Client` whose API server refuses every list."""

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        self.asked = 0

    async def pages(self, *_: object, **__: object) -> AsyncIterator[tuple[list[Any], str]]:
        self.asked += 1
        error = ApiError(429, "TooManyRequests", "slow down")
        error.retry_after_s = self.retry_after_s
        raise error
        yield [], ""


@pytest.mark.parametrize(("retry_after_s", "once"), [(0.0, False), (60.0, True)])
async def test_a_busy_api_server_is_asked_again_when_it_wants_to_be(
    monkeypatch: pytest.MonkeyPatch, retry_after_s: float, once: bool
) -> None:
    monkeypatch.setattr(resync, "RESYNC_RETRY_S", 0.0)
    server = BusyServer(retry_after_s)
    tried = resync.Resync(server, Cache(lambda _: None), None, nodes=False)  # type: ignore[arg-type]
    tried.begin()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await tried.run(lambda: None)
    assert (server.asked == 1) is once
