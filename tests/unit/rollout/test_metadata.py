"""What three clouds say to a machine that will be taken away, as responses and what they mean; no socket."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from polyrl.errors import ProtocolError
from polyrl.manifest.rollout import CapacitySpec
from polyrl.sample import Pool
from polyrl_rollout.metadata import (
    ACTION_PATH,
    EVENTS_PATH,
    NAME_PATH,
    NOTICE_S,
    REBALANCE_PATH,
    TOKEN_PATH,
    Aws,
    Azure,
    CloudMetadata,
    Gcp,
    MetadataRequest,
    MetadataResponse,
    PollResult,
    action_notice,
    asked_cloud,
    event_notice,
    preemption_notice,
)

NOW = datetime(2026, 1, 1, 0, 0, 0, tzinfo=UTC).timestamp()


def polled(cloud: CloudMetadata, *responses: MetadataResponse) -> tuple[list[MetadataRequest], PollResult]:
    """One poll, answered in turn: the requests, and the result. Every response is asked for."""
    requests: list[MetadataRequest] = []

    async def ask(request: MetadataRequest) -> MetadataResponse:
        requests.append(request)
        return responses[len(requests) - 1]

    result = asyncio.run(cloud.poll(ask, NOW))
    assert len(requests) == len(responses)
    return requests, result


def test_aws_is_asked_with_a_token_which_is_kept() -> None:
    cloud, nothing = Aws(), MetadataResponse(404)
    requests, result = polled(cloud, MetadataResponse(200, b"t1"), nothing, nothing)
    assert [(request.method, request.path) for request in requests] == [
        ("PUT", TOKEN_PATH),
        ("GET", ACTION_PATH),
        ("GET", REBALANCE_PATH),
    ]
    assert requests[0].headers == {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    assert requests[1].headers == requests[2].headers == {"X-aws-ec2-metadata-token": "t1"}
    assert result == PollResult()
    requests, _ = polled(cloud, nothing, nothing)
    assert [request.method for request in requests] == ["GET", "GET"]


def test_an_expired_token_of_aws_is_drawn_anew_once() -> None:
    cloud, nothing = Aws(), MetadataResponse(404)
    polled(cloud, MetadataResponse(200, b"t1"), nothing, nothing)
    requests, _ = polled(cloud, MetadataResponse(401), MetadataResponse(200, b"t2"), nothing, nothing)
    assert [request.headers.get("X-aws-ec2-metadata-token") for request in requests] == ["t1", None, "t2", "t2"]
    with pytest.raises(ProtocolError, match="status 401"):
        polled(cloud, MetadataResponse(401), MetadataResponse(200, b"t3"), MetadataResponse(401))


def test_aws_notices_with_its_own_deadline_and_a_rebalance_is_only_advice() -> None:
    action = b'{"action": "terminate", "time": "2026-01-01T00:02:00Z"}'
    _, result = polled(Aws(), MetadataResponse(200, b"t"), MetadataResponse(200, action))
    assert result.notice is not None
    assert (result.notice.seconds, result.notice.reason) == (120.0, "AWS will terminate the instance")
    _, result = polled(
        Aws(),
        MetadataResponse(200, b"t"),
        MetadataResponse(404),
        MetadataResponse(200, b'{"noticeTime": "2026-01-01T00:00:00Z"}'),
    )
    assert result.notice is None
    assert "rebalance" in result.advice


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        (b'{"action": "stop", "time": "2026-01-01T00:00:30Z"}', 30.0),
        (b'{"action": "hibernate", "time": "2025-12-31T23:59:00Z"}', 0.0),
        (b'{"action": "stop", "time": "2026-01-01T01:00:30+01:00", "new": 1}', 30.0),
        (b'{"action": "stop", "time": "2026-01-01T00:00:30"}', None),
        (b'{"action": "stop"}', None),
        (b"<html>", None),
        (b"\xff", None),
    ],
    ids=["ahead", "past", "another zone", "no zone", "no time", "no JSON", "no UTF-8"],
)
def test_aws_answers(body: bytes, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ProtocolError, match="spot/instance-action"):
            action_notice(body, NOW)
    else:
        assert action_notice(body, NOW).seconds == seconds


def test_google_is_asked_to_wait_for_a_change_of_what_we_know() -> None:
    cloud = Gcp()
    (first,), result = polled(cloud, MetadataResponse(200, b"FALSE\n", etag="e1"))
    assert first.headers == {"Metadata-Flavor": "Google"}
    assert first.wait_s > 0
    assert "last_etag=0" in first.path, "what nobody has as its tag is answered at once"
    assert result == PollResult()
    (second,), result = polled(cloud, MetadataResponse(200, b"TRUE", etag="e2"))
    assert "wait_for_change=true" in second.path
    assert "last_etag=e1" in second.path, "a change between two questions is not missed"
    assert result.notice is not None
    assert result.notice.seconds == NOTICE_S
    with pytest.raises(ProtocolError, match="neither TRUE nor FALSE"):
        preemption_notice(b"<html>")
    with pytest.raises(ProtocolError, match="status 403"):
        polled(Gcp(), MetadataResponse(403))


def event(kind: str, machine: str = "vm-1", before: str = "Thu, 01 Jan 2026 00:00:30 GMT") -> str:
    return f'{{"EventId": "1", "EventType": "{kind}", "Resources": ["vm-0", "{machine}"], "NotBefore": "{before}"}}'


def events(*some: str) -> bytes:
    return f'{{"DocumentIncarnation": 1, "Events": [{", ".join(some)}]}}'.encode()


def test_azure_asks_once_who_it_is() -> None:
    cloud = Azure()
    requests, result = polled(cloud, MetadataResponse(200, b"vm-1"), MetadataResponse(200, events()))
    assert [request.path for request in requests] == [NAME_PATH, EVENTS_PATH]
    assert {request.headers["Metadata"] for request in requests} == {"true"}
    assert result == PollResult()
    requests, result = polled(cloud, MetadataResponse(200, events(event("Preempt"))))
    assert [request.path for request in requests] == [EVENTS_PATH]
    assert result.notice is not None
    assert (result.notice.seconds, result.notice.reason) == (30.0, "Azure: Preempt is scheduled")


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        (events(event("Preempt")), 30.0),
        (events(event("Terminate"), event("Redeploy", before="Thu, 01 Jan 2026 00:00:10 GMT")), 10.0),
        (events(event("Reboot", before="")), 0.0),
        (events(event("Preempt", before="Wed, 31 Dec 2025 00:00:00 GMT")), 0.0),
        (events(event("Freeze")), None),
        (events(event("Preempt", machine="vm-2")), None),
        (events(), None),
        (b"{}", None),
    ],
    ids=["one", "the first counts", "begun", "past", "a freeze", "another machine", "none", "no list"],
)
def test_azure_events(body: bytes, seconds: float | None) -> None:
    notice = event_notice(body, "vm-1", NOW)
    assert (None if notice is None else notice.seconds) == seconds


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"Events": 1}', events(event("Preempt", before="soon"))],
    ids=["empty", "a list", "no list of events", "no date"],
)
def test_what_azure_does_not_say(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="scheduledevents"):
        event_notice(body, "vm-1", NOW)


@pytest.mark.parametrize("preset", ["None", "Karpenter", "GKE", "AKS", "EKSManaged"])
def test_nobody_is_asked_unless_the_manifest_says_so(preset: str) -> None:
    silent, asking = (CapacitySpec.model_validate({"preset": preset, "metadataService": on}) for on in (False, True))
    assert CapacitySpec.model_validate({"preset": preset}) == silent
    assert [asked_cloud(silent, pool) for pool in Pool] == [None] * len(Pool)
    asked = {pool for pool in Pool if asked_cloud(asking, pool) is not None}
    assert asked == (set() if preset == "None" else {Pool.SPOT, Pool.ON_DEMAND})
