"""As much of an API server as one operator asks for, in memory: lists in pages, watches, and writes that always pass.

A PolyRLJob's spec is kept as the text that its author sent: what a real server would have refused or pruned reaches the
operator here. What is owned by nothing that is there is collected, as by a real server's controller: else what the
operator makes in the moment in which a job goes would stay, and be kept by it too.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from aiohttp import web

from polyrl_operator.api.kinds import EVENT, JOB, KINDS

MAX_BODY: Final = 8 << 20
COLLECT_S: Final = 1.0
"""From the creation of what has no owner to its end."""
KEPT_CHANGES: Final = 10_000
"""Per collection, for a watch that begins a little later than its list."""


@dataclass
class Stored:
    """An object: its fields as JSON text but for metadata and status."""

    metadata: dict[str, Any]
    rest: str
    status: str = ""

    @property
    def text(self) -> str:
        status = f',"status":{self.status}' if self.status else ""
        rest = f",{self.rest}" if self.rest else ""
        return f'{{"metadata":{json.dumps(self.metadata)}{rest}{status}}}'


@dataclass
class Collection:
    """Objects of one kind in all namespaces, and what happened to them."""

    objects: dict[tuple[str, str], Stored] = field(default_factory=dict)
    changes: list[tuple[int, bytes]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class FakeApiServer:
    """Serves on a free port of this machine; `on_status` is called with a job's name when its status is written."""

    def __init__(self, namespaces: Iterable[str], on_status: Callable[[str, str], None]) -> None:
        self._on_status = on_status
        self._collections: dict[str, Collection] = defaultdict(Collection)
        for namespace in namespaces:
            self._collections[NAMESPACES].objects["", namespace] = Stored({"name": namespace, "uid": "u"}, "")
        self._uids: set[str] = set()
        """Of all that is there."""
        self._collecting = set[asyncio.Task[None]]()
        self._lists: dict[str, tuple[int, list[Stored]]] = {}
        """Of which further pages will be asked for, with their version."""
        self._version = 1

    async def start(self) -> str:
        """Gives the URL."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/api", lambda _: web.json_response({"versions": ["v1"]}))
        app.router.add_get("/apis", lambda _: web.json_response({"groups": _groups()}))
        app.router.add_route("*", "/{root:apis?}/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def put_job(self, namespace: str, name: str, rest: str) -> None:
        """A tenant makes a job of this text."""
        metadata = {"name": name, "namespace": namespace, "uid": str(uuid.uuid4()), "generation": 1}
        metadata["creationTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await self._store(JOB.plural, namespace, name, Stored(metadata, rest), "ADDED")

    async def delete(self, plural: str, namespace: str, name: str) -> Stored | None:
        stored = self._collections[plural].objects.pop((namespace, name), None)
        if stored is not None:
            self._uids.discard(stored.metadata["uid"])
            await self._announce(plural, stored, "DELETED")
        return stored

    async def delete_of(self, namespace: str, job: str) -> None:
        """A job and all that was made for it."""
        for plural, collection in self._collections.items():
            for where, name in list(collection.objects):
                if where == namespace and (name == job or name.startswith(f"{job}-")):
                    await self.delete(plural, where, name)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        if not parts:
            group = request.path.strip("/").removeprefix("apis/") if request.path.startswith("/apis") else "v1"
            return web.json_response({"resources": _resources(group)})
        namespace = parts[1] if parts[0] == "namespaces" and len(parts) > 2 else ""
        plural, name, sub = ([*parts[2:], "", ""] if namespace else [*parts, "", ""])[:3]
        if request.method == "GET" and not name:
            watches = "watch" in request.query
            return await (self._watch(request, plural) if watches else self._list(request, plural))
        return await self._one(request, plural, namespace, name, sub)

    async def _list(self, request: web.Request, plural: str) -> web.Response:
        token, _, place = request.query.get("continue", "").partition("/")
        if not token:
            # All pages are of one moment, as a real server's: what came since would be taken for gone.
            token, found = uuid.uuid4().hex, list(self._collections[plural].objects.values())
            self._lists[token] = self._version, found
        (version, found), begin = self._lists[token], int(place or 0)
        limit = int(request.query.get("limit") or len(found) or 1)
        more = {"continue": f"{token}/{begin + limit}"} if begin + limit < len(found) else {}
        if not more:
            del self._lists[token]
        head = json.dumps({"resourceVersion": str(version)} | more)
        items = ",".join(one.text for one in found[begin : begin + limit])
        return _answer(f'{{"kind":"List","apiVersion":"v1","metadata":{head},"items":[{items}]}}')

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        collection, seen = self._collections[plural], int(request.query.get("resourceVersion") or self._version)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            for version, line in [one for one in collection.changes[-KEPT_CHANGES:] if one[0] > seen]:
                await response.write(line)
                seen = version
            async with collection.changed:
                if not collection.changes or collection.changes[-1][0] <= seen:
                    await collection.changed.wait()

    async def _one(self, request: web.Request, plural: str, namespace: str, name: str, sub: str) -> web.Response:
        body = json.loads(await request.read() or b"{}")
        known = self._collections[plural].objects.get((namespace, name))
        if request.method in ("POST", "PUT") or (request.method == "PATCH" and known is None and plural != JOB.plural):
            stored = await self._write(plural, namespace, body, known, dry_run="dryRun" in request.query)
            return _answer(stored.text, 201)
        if known is None:
            return _answer('{"kind":"Status","reason":"NotFound","message":"not found","code":404}', 404)
        if request.method == "DELETE":
            await self.delete(plural, namespace, name)
        elif request.method == "PATCH":
            if plural == JOB.plural and sub == "status" and "status" in body:
                known.status = json.dumps(body["status"])
                self._on_status(name, known.status)
            await self._store(plural, namespace, name, known, "MODIFIED")
        return _answer(known.text)

    async def _write(
        self, plural: str, namespace: str, body: dict[str, Any], known: Stored | None, *, dry_run: bool
    ) -> Stored:
        metadata = {"uid": str(uuid.uuid4())} | body.pop("metadata", {}) | {"namespace": namespace}
        name = metadata.setdefault("name", metadata.get("generateName", "") + uuid.uuid4().hex[:6])
        stored = Stored(metadata, json.dumps(body)[1:-1])
        if not dry_run and plural != EVENT.plural:
            await self._store(plural, namespace, name, stored, "MODIFIED" if known else "ADDED")
            owners = [owner["uid"] for owner in metadata.get("ownerReferences", ())]
            if owners and not self._uids.intersection(owners):
                task = asyncio.create_task(self._collect(plural, namespace, name))
                self._collecting.add(task)
                task.add_done_callback(self._collecting.discard)
        return stored

    async def _collect(self, plural: str, namespace: str, name: str) -> None:
        await asyncio.sleep(COLLECT_S)
        await self.delete(plural, namespace, name)

    async def _store(self, plural: str, namespace: str, name: str, stored: Stored, change: str) -> None:
        self._collections[plural].objects[namespace, name] = stored
        self._uids.add(stored.metadata["uid"])
        await self._announce(plural, stored, change)

    async def _announce(self, plural: str, stored: Stored, change: str) -> None:
        self._version += 1
        stored.metadata["resourceVersion"] = str(self._version)
        if plural not in WATCHED:
            return
        collection = self._collections[plural]
        line = f'{{"type":"{change}","object":{stored.text}}}\n'.encode()
        async with collection.changed:
            collection.changes.append((self._version, line))
            if len(collection.changes) > 2 * KEPT_CHANGES:
                del collection.changes[:KEPT_CHANGES]
            collection.changed.notify_all()


NAMESPACES: Final = "namespaces"
"""kopf asks for them."""
WATCHED: Final = (JOB.plural, "pods", "jobs")


def _answer(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="application/json")


def _groups() -> list[dict[str, Any]]:
    versions = {kind.group: kind.version for kind in KINDS.values() if kind.group}
    made = [(group, {"groupVersion": f"{group}/{version}", "version": version}) for group, version in versions.items()]
    return [{"name": group, "versions": [one], "preferredVersion": one} for group, one in made]


def _resources(group: str) -> list[dict[str, Any]]:
    described = [(kind.plural, kind.name, kind.namespaced) for kind in KINDS.values() if kind.api_version == group]
    described += [(NAMESPACES, "Namespace", False)] if group == "v1" else []
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    return [
        {"name": plural, "kind": kind, "namespaced": namespaced, "verbs": verbs, "singularName": ""}
        for plural, kind, namespaced in described
    ]
