"""The page of the run that this manager serves, made of what it remembers, in a thread: tokens go on meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

from polyrl.manifest.job import PolyRLJob
from polyrl.page.contents import RunRecord
from polyrl.page.page import PAGE_HEADERS, render_page
from polyrl.status import ManagerStatus
from polyrl_rollout.manager.history import RunHistory

FRESH_S: Final = 2.0
"""A page so young is shown again: many who reload it cost no more than one."""


class RunPage:
    """Makes one page at a time."""

    def __init__(self, job: PolyRLJob | None, status: Callable[[], ManagerStatus], history: RunHistory) -> None:
        self._settings: dict[str, Any] = {}
        if job is not None:
            self._settings = job.model_dump(mode="json", by_alias=True, exclude_none=True)
        self._name = "" if job is None else job.metadata.name
        self._status, self._history = status, history
        self._making = asyncio.Lock()
        self._made: tuple[float, str] = -FRESH_S, ""

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answers with the page as it is now."""
        async with self._making:
            made_at, text = self._made
            if time.monotonic() - made_at >= FRESH_S:
                text = await asyncio.to_thread(render_page, self._record(time.time()))
                self._made = time.monotonic(), text
        return web.Response(text=text, content_type="text/html", headers=PAGE_HEADERS)

    def _record(self, now: float) -> RunRecord:
        """Copies: the loop goes on changing what they were made of."""
        status, known = self._status(), self._history.since(0.0, now)
        state = "running" if not status.finished else "succeeded" if status.ok else "failed"
        return RunRecord(
            job=self._name,
            state=state,
            why=status.message,
            job_settings=self._settings,
            settings=json.dumps(self._settings, indent=2, ensure_ascii=False),
            rows=known.rows,
            events=known.events,
            samples=self._history.samples(),
            seconds=(self._history.finished_at or now) - known.began,
            held=known.seconds,
            machines=known.machines,
            counts=status.samples,
            tokens=status.tokens,
            provenance={"made of": "what the manager remembers", "which begins": _begins(known.began, known.resumed)},
        )


def _begins(began: float, resumed: bool) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began))
    return f"{at}, when it was started again; what was before lies with the trainer" if resumed else at
