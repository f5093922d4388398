"""Who leads, also where the API server is slow; who we are, read from our token."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from polyrl_operator.api.client import ApiError
from polyrl_operator.leader import Leader, Terms, service_account

CLAIMS = {"kubernetes.io": {"serviceaccount": {"name": "polyrl-operator", "uid": "u-1"}}}


def token(claims: object) -> str:
    return f"head.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.signature"


def test_a_pods_token_names_its_service_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token(CLAIMS))
    reference = service_account(tmp_path / "token")
    assert reference == {"apiVersion": "v1", "kind": "ServiceAccount", "name": "polyrl-operator", "uid": "u-1"}


@pytest.mark.parametrize("text", ["", "opaque", "a.b.c", token({}), token([]), token({"kubernetes.io": None}), "é.ü.ß"])
def test_anything_else_names_nobody(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    assert service_account(tmp_path / "token") is None
    assert service_account(tmp_path / "absent") is None


class Server:
    """Plays a `Client` and a server that keeps one Lease and takes `slow_s` for each request."""

    def __init__(self, slow_s: float) -> None:
        self.slow_s, self.asked = slow_s, list[str]()
        self.lease: dict[str, Any] | None = None
        self.version = 0

    async def get(self, *_: object) -> dict[str, Any] | None:
        self.asked.append("get")
        await asyncio.sleep(self.slow_s)
        return copy.deepcopy(self.lease)

    async def create(self, lease: dict[str, Any]) -> dict[str, Any]:
        return await self._store("create", lease)

    async def update(self, lease: dict[str, Any]) -> dict[str, Any]:
        assert self.lease is not None
        if lease["metadata"].get("resourceVersion") != self.lease["metadata"]["resourceVersion"]:
            self.asked.append("conflict")
            raise ApiError(409, "Conflict", "it has been changed")
        return await self._store("update", lease)

    async def _store(self, verb: str, lease: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(verb)
        await asyncio.sleep(self.slow_s)
        self.version += 1
        self.lease = lease | {"metadata": lease["metadata"] | {"resourceVersion": str(self.version)}}
        return copy.deepcopy(self.lease)

    def take(self, holder: str) -> None:
        """Somebody else changes it."""
        assert self.lease is not None
        self.version += 1
        metadata = self.lease["metadata"] | {"resourceVersion": str(self.version)}
        spec = self.lease["spec"] | {"holderIdentity": holder}
        self.lease = self.lease | {"metadata": metadata, "spec": spec}


TERMS = Terms(duration_s=3.0, renew_s=2.0, retry_s=0.05)
"""A request may take a second, half of `renew_s`."""


async def led(server: Server, seconds: float) -> tuple[Leader, list[str]]:
    """What a replica saw that stood for election for so long."""
    calls = list[str]()
    leader = Leader(server, "ns", "lease", "me", TERMS)  # type: ignore[arg-type]
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await leader.run(lambda: calls.append("began"), lambda: calls.append("ended"))
    return leader, calls


@pytest.mark.slow
async def test_each_request_for_the_lease_may_take_long_and_not_all_of_them_together() -> None:
    server = Server(slow_s=0.7)
    leader, calls = await led(server, 5.0)
    assert (calls, leader.leads()) == (["began"], True)


async def test_a_holder_asks_once_to_renew() -> None:
    server = Server(slow_s=0.0)
    await led(server, 0.5)
    assert server.asked[:2] == ["get", "create"]
    assert server.asked.count("update") > 2
    assert server.asked.count("get") == 1


async def test_a_holder_whose_lease_was_changed_reads_it_and_leaves_it_to_whom_it_names() -> None:
    server = Server(slow_s=0.0)
    leader, _ = await led(server, 0.2)
    server.take("other")
    with suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await leader.run(lambda: None, lambda: None)
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == "other"
    assert server.asked[-1] == "get"
    server.take("me")
    server.lease["spec"] |= {"leaseTransitions": 7}
    async with asyncio.timeout(2):
        await leader._try_lease()
    assert leader.leads()


async def test_only_a_lease_that_had_another_holder_is_taken_over() -> None:
    server = Server(slow_s=0.0)
    leader = Leader(server, "ns", "lease", "me", TERMS)  # type: ignore[arg-type]
    await leader._try_lease()
    leader.taken_over = False
    server.take("me")
    await leader._try_lease()
    await leader._try_lease()
    assert not leader.taken_over, "nobody else has led"
    server.take("")
    await leader._try_lease()
    assert leader.taken_over


async def test_a_holder_that_finds_another_in_its_lease_stops_at_once() -> None:
    """Whoever deletes or edits the Lease lets another begin; the holder went on for the rest of `renew_s`."""
    server = Server(slow_s=0.0)
    leader, _ = await led(server, 0.2)
    assert leader.leads()
    server.take("other")
    await leader._try_lease()
    assert not leader.leads()


async def test_a_holder_that_stood_still_while_another_led_begins_anew() -> None:
    server, calls = Server(slow_s=0.0), list[tuple[str, bool]]()
    leader = Leader(server, "ns", "lease", "me", TERMS)  # type: ignore[arg-type]
    notes = (lambda: calls.append(("began", leader.taken_over)), lambda: calls.append(("ended", leader.leads())))
    task = asyncio.create_task(leader.run(*notes))
    await asyncio.sleep(4 * TERMS.retry_s)
    # It sees neither of the two.
    server.take("other")
    server.take("")
    await asyncio.sleep(8 * TERMS.retry_s)
    task.cancel()
    assert [name for name, _ in calls] == ["began", "ended", "began"]
    assert calls[-1] == ("began", True), "what it knew is of before the other"
