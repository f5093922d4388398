"""One replica acts at a time: it holds a Lease of coordination.k8s.io, and renews it. The others watch and wait.

No clocks are compared: a standby takes over when it has itself seen the Lease unchanged for its whole duration, and the
holder stops by its own clock, earlier than that. A holder that could not renew stops writing at once, and must take the
Lease anew; what it had in flight is harmless, because names are made before requests and writes name uids and versions.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from polyrl.cluster.actions import Object
from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.kinds import LEASE

log = structlog.get_logger(__name__)

T = TypeVar("T")

TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


@dataclass(frozen=True)
class Terms:
    """Durations of the Lease, in seconds."""

    duration_s: float = 15.0
    """A standby takes over after so long without a renewal."""
    renew_s: float = 10.0
    """The holder stops acting after so long without one: earlier than anybody else begins."""
    retry_s: float = 2.0
    """Between renewals, and between a standby's attempts."""


DEFAULT_TERMS: Final = Terms()
"""client-go's defaults, which cluster operators know."""


class Leader:
    """Run `run` as a task; `leads` is asked before every write."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        identity: str,
        terms: Terms = DEFAULT_TERMS,
        owner: Object | None = None,
    ) -> None:
        """`owner`: an owner reference for a Lease that is made here."""
        self._client, self._namespace, self._name, self._owner = client, namespace, name, owner
        self._identity, self._terms = identity, terms
        self._renewed_at = float("-inf")
        self._seen: tuple[object, ...] = ()
        self._seen_at = 0.0
        self._held: Object | None = None
        """The Lease as we stored it last."""
        self.taken_over = False
        """The Lease had another holder before this term, who may have acted; `began` is called while it is set."""

    def leads(self) -> bool:
        """True while no other replica can hold the Lease."""
        return time.monotonic() - self._renewed_at < self._terms.renew_s

    async def run(self, began: Callable[[], None], ended: Callable[[], None]) -> None:
        """Takes and renews the Lease until cancelled; calls `began` whenever it was taken, `ended` when lost."""
        led = False
        while True:
            try:
                await self._try_lease()
            except (ApiError, TimeoutError) as error:
                log.warning("lease not renewed", error=str(error) or "no answer in time", leads=self.leads())
            # A process that stood still may find that another has led and left since its last look.
            if led and (self.taken_over or not self.leads()):
                led = False
                log.info("lost leadership", lease=self._name, identity=self._identity)
                ended()
            if self.leads() and not led:
                led = True
                log.info("became leader", lease=self._name, identity=self._identity)
                began()
                self.taken_over = False
            await asyncio.sleep(self._terms.retry_s)

    async def release(self) -> None:
        """Gives it back, so that a standby need not wait; a Lease that cannot be given back runs out."""
        if not self.leads():
            return
        # First of all, nothing more is written.
        self._renewed_at = float("-inf")
        try:
            lease = await self._client.get(LEASE, self._namespace, self._name)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "renewTime": _now()}
                await self._client.update(lease)
        except ApiError as error:
            log.warning("lease not given back", error=str(error))

    async def _try_lease(self) -> None:
        """Renews the Lease, or reads it and takes it if that is right. Raises ApiError, and TimeoutError for a request
        that takes longer than half of what a holder may act without renewing."""
        held, self._held = self._held, None
        if held is not None:
            try:
                return await self._store(self._client.update(self._taken(held)))
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
        asked_at = time.monotonic()
        lease = await self._in_time(self._client.get(LEASE, self._namespace, self._name))
        if lease is None or lease["spec"].get("holderIdentity") != self._identity:
            # Who deletes or edits a Lease lets another begin at once.
            self._renewed_at = float("-inf")
        if lease is None:
            await self._store(self._client.create(self._fresh()))
        elif self._may_take(lease["spec"], asked_at):
            await self._store(self._client.update(self._taken(lease)))

    async def _store(self, request: Awaitable[Object]) -> None:
        # From before the request: what the server writes is no older than that.
        asked_at = time.monotonic()
        self._held = await self._in_time(request)
        self._renewed_at = asked_at

    async def _in_time(self, request: Awaitable[T]) -> T:
        async with asyncio.timeout(self._terms.renew_s / 2):
            return await request

    def _may_take(self, spec: dict[str, Any], now: float) -> bool:
        seen = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        holder = spec.get("holderIdentity")
        if holder in (None, "", self._identity):
            return True
        return now - self._seen_at > float(spec.get("leaseDurationSeconds") or self._terms.duration_s)

    def _fresh(self) -> Object:
        self.taken_over = True
        metadata: Object = {"name": self._name, "namespace": self._namespace}
        metadata |= {"ownerReferences": [self._owner]} if self._owner else {}
        spec = self._spec() | {"acquireTime": _now(), "leaseTransitions": 0}
        return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata, "spec": spec}

    def _taken(self, lease: Object) -> Object:
        spec = lease["spec"]
        if spec.get("holderIdentity") != self._identity:
            self.taken_over = True
            spec |= {"acquireTime": _now(), "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        return {"apiVersion": LEASE.api_version, "kind": LEASE.name, **lease, "spec": spec | self._spec()}

    def _spec(self) -> dict[str, Any]:
        seconds = max(1, round(self._terms.duration_s))
        return {"holderIdentity": self._identity, "leaseDurationSeconds": seconds, "renewTime": _now()}


def service_account(token: Path = TOKEN) -> Object | None:
    """An owner reference to our own ServiceAccount, as our token names it: then the Lease goes with the release. None
    outside a pod, and for a token of another kind. The token is not verified: that is for the API server to do."""
    try:
        payload = token.read_text(encoding="ascii").split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        account = claims["kubernetes.io"]["serviceaccount"]
        return {"apiVersion": "v1", "kind": "ServiceAccount", "name": account["name"], "uid": account["uid"]}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
