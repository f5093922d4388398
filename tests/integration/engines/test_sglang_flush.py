"""How the scheduler is asked to forget: by a stand-in for SGLang that sleeps as it does where it is asked to wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl_rollout.engines.port import EngineFailed
from polyrl_rollout.engines.sglang import engine as module
from polyrl_rollout.engines.sglang.engine import SGLangEngine


class Scheduler:
    """Busy for some questions; who lets it wait is answered when it wakes from its sleep, a second later."""

    def __init__(self) -> None:
        self.busy, self.asked, self.slept = 2, 0, 0

    async def flush(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.asked <= self.busy:
            if float(request.query.get("timeout", "0")) <= 0:
                return web.Response(status=400, text="Flush cache failed.")
            self.slept += 1
        return web.Response(text="Cache flushed.")


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[Scheduler, SGLangEngine]]:
    scheduler, app = Scheduler(), web.Application()
    app.router.add_post("/flush_cache", scheduler.flush)
    engine = SGLangEngine(EngineSpec(type=EngineType.SGLANG))
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        engine._session, engine._child = session, SimpleNamespace(returncode=None)
        yield scheduler, engine


async def test_it_is_not_asked_to_wait(scheduler: tuple[Scheduler, SGLangEngine]) -> None:
    await scheduler[1]._flush()
    assert (scheduler[0].asked, scheduler[0].slept) == (3, 0)


async def test_one_that_never_forgets_is_given_up(
    scheduler: tuple[Scheduler, SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIESCE_DEADLINE_S", 0.1)
    scheduler[0].busy = 10**6
    with pytest.raises(EngineFailed, match="Flush cache failed"):
        await scheduler[1]._flush()
