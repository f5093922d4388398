"""A machine's metadata on AWS, Google Cloud and Azure at once, as far as their notices go; for tests and rehearsals.

It is strict where the clouds are: a missing token, header or tag is refused.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Final

from aiohttp import web

MACHINE: Final = "aks-spot_1"
TOKEN: Final = "a-token-of-six-hours"
FORBIDDEN: Final = 403
UNAUTHORIZED: Final = 401
NOT_THERE: Final = 404


class FakeMetadata:
    """Says nothing until `take_away`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """Paths, in order."""
        self._ends_at = 0.0
        self._changed = asyncio.Event()

    def take_away(self, seconds: float) -> None:
        """From now on the machine ends within `seconds`."""
        self._ends_at = time.time() + seconds
        self._changed.set()

    def app(self) -> web.Application:
        """To be served as http://169.254.169.254 is."""
        app = web.Application()
        app.router.add_put("/latest/api/token", self._token)
        app.router.add_get("/latest/meta-data/spot/instance-action", self._instance_action)
        app.router.add_get("/latest/meta-data/events/recommendations/rebalance", self._rebalance)
        app.router.add_get("/computeMetadata/v1/instance/preempted", self._preempted)
        app.router.add_get("/metadata/instance/compute/name", self._name)
        app.router.add_get("/metadata/scheduledevents", self._events)
        return app

    async def _token(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        asked_for = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        return web.Response(text=TOKEN) if asked_for.isdecimal() else web.Response(status=FORBIDDEN)

    async def _instance_action(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            return web.Response(status=UNAUTHORIZED)
        if not self._ends_at:
            return web.Response(status=NOT_THERE)
        when = datetime.fromtimestamp(self._ends_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return web.json_response({"action": "terminate", "time": when})

    async def _rebalance(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        known = request.headers.get("X-aws-ec2-metadata-token") == TOKEN
        return web.Response(status=NOT_THERE if known else UNAUTHORIZED)

    async def _preempted(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=FORBIDDEN)
        if request.query.get("wait_for_change") == "true" and request.query.get("last_etag") == self._etag():
            await self._await_change(float(request.query.get("timeout_sec", "inf")))
        return web.Response(text="TRUE" if self._ends_at else "FALSE", headers={"ETag": self._etag()})

    def _etag(self) -> str:
        return "taken" if self._ends_at else "stays"

    async def _await_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _name(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return web.Response(text=MACHINE) if _is_azures(request) else web.Response(status=FORBIDDEN)

    async def _events(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if not _is_azures(request):
            return web.Response(status=FORBIDDEN)
        before = formatdate(self._ends_at, usegmt=True)
        event = {"EventId": "1", "EventType": "Preempt", "Resources": [MACHINE], "NotBefore": before}
        return web.json_response({"DocumentIncarnation": 1, "Events": [event] if self._ends_at else []})


def _is_azures(request: web.Request) -> bool:
    return request.headers.get("Metadata") == "true" and "api-version" in request.query
