"""A manager's certificate on a real API server: an operator that finds it half over puts a fresh one of the same
authority into its one Secret, and changes nothing else of it."""

from __future__ import annotations

import base64
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509

from polyrl.cluster import names
from polyrl.cluster.fleet.certificate import LIFE_S
from polyrl_operator.api.kinds import SECRET

OWN = "job-keys-manager"
HALF_OVER = timedelta(days=6)
"""Left of fourteen days."""


async def test_a_certificate_that_is_half_over_is_replaced(place: Any, nodes: Any, start_operator: Any) -> None:
    async with start_operator(name="first") as first:
        await place.submit()
        await place.rollouts(2)
        before = await stored(place)
        ends_at = (datetime.now(UTC) + HALF_OVER).strftime("%Y-%m-%dT%H:%M:%SZ")
        change = {"metadata": {"annotations": {names.ANNOTATION_EXPIRES: ends_at}}}
        await place.client.patch(SECRET, place.namespace, OWN, change)
        assert await first.end() == 0
    async with start_operator(name="second") as second:
        after = await place.until("a fresh certificate", lambda: changed(place, before))
        assert await second.end() == 0
        assert not [line for line in second.lines if line.get("level") in ("error", "critical")]
    root = await place.client.get(SECRET, place.namespace, "job-keys")
    authority = x509.load_pem_x509_certificate(base64.b64decode(root["data"]["ca.crt"]))
    leaf = leaf_of(after)
    leaf.verify_directly_issued_by(authority)
    assert abs(leaf.not_valid_after_utc.timestamp() - time.time() - LIFE_S) < 3_600
    assert leaf.public_key() != leaf_of(before).public_key(), "what a lost node held is worth nothing afterwards"
    assert after["metadata"]["annotations"][names.ANNOTATION_EXPIRES] > ends_at
    kept = set(before["data"]) - {"tls.crt", "tls.key"}
    assert {name: after["data"][name] for name in kept} == {name: before["data"][name] for name in kept}


async def stored(place: Any) -> dict[str, Any]:
    found: dict[str, Any] = await place.client.get(SECRET, place.namespace, OWN)
    return found


async def changed(place: Any, before: dict[str, Any]) -> dict[str, Any] | None:
    now = await stored(place)
    return now if now["data"]["tls.crt"] != before["data"]["tls.crt"] else None


def leaf_of(secret: dict[str, Any]) -> x509.Certificate:
    return x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
