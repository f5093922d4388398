"""How the scheduler is asked to forget, and what becomes of answers that are none.

By a stand-in for SGLang that sleeps as it does where it is asked to wait."""

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
from polyrl_rollout.engines.sglang.engine import SGLangEngine, kv_tokens_of


class Scheduler:
    """Busy for some questions; who lets it wait is answered when it wakes from its sleep, a second later."""

    def __init__(self) -> None:
        self.busy, self.asked, self.slept = 2, 0, 0
        self.answer = "Cache flushed."

    async def flush(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.asked <= self.busy:
            if float(request.query.get("timeout", "0")) <= 0:
                return web.Response(status=400, text="Flush cache failed.")
            self.slept += 1
        return web.Response(text=self.answer)


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


async def test_half_an_answer_is_an_engine_that_failed(scheduler: tuple[Scheduler, SGLangEngine]) -> None:
    scheduler[0].answer = '{"success": tru'
    with pytest.raises(
        EngineFailed, match=r'^SGLang answered /flush_cache with what is no JSON object: {"success": tru$'
    ):
        await scheduler[1]._flush()


@pytest.mark.parametrize("info", [{}, {"max_total_num_tokens": None}, {"max_total_num_tokens": 0}])
def test_a_server_that_does_not_say_what_its_cache_holds_is_an_engine_that_failed(info: dict[str, object]) -> None:
    with pytest.raises(EngineFailed, match=r"SGLang's /server_info: max_total_num_tokens is .*; it should be"):
        kv_tokens_of(info)


def test_what_its_cache_holds() -> None:
    assert kv_tokens_of({"max_total_num_tokens": 4096}) == 4096
