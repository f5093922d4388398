"""What three clouds say to a machine that will be taken away, as answers and what they mean; no socket."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from polyrl.errors import ProtocolError
from polyrl_rollout.metadata.asking import Answer, Cloud, Finding, Question
from polyrl_rollout.metadata.aws import ACTION_PATH, REBALANCE_PATH, TOKEN_PATH, Aws, action_notice
from polyrl_rollout.metadata.azure import EVENTS_PATH, NAME_PATH, Azure, event_notice
from polyrl_rollout.metadata.gcp import NOTICE_S, Gcp, preemption_notice

NOW = datetime(2026, 1, 1, 0, 0, 0, tzinfo=UTC).timestamp()


def looked(cloud: Cloud, *answers: Answer) -> tuple[list[Question], Finding]:
    """One look, answered in turn: the questions, and the finding. Every answer is asked for."""
    look, asked = cloud.look(NOW), []
    try:
        asked.append(next(look))
        for answer in answers:
            asked.append(look.send(answer))  # noqa: PERF401 - extend would swallow the end of the look
    except StopIteration as told:
        assert len(asked) == len(answers)
        return asked, told.value
    raise AssertionError(f"no finding after {asked}")


def test_aws_is_asked_with_a_token_which_is_kept() -> None:
    cloud, nothing = Aws(), Answer(404)
    asked, finding = looked(cloud, Answer(200, b"t1"), nothing, nothing)
    assert [(one.method, one.path) for one in asked] == [
        ("PUT", TOKEN_PATH),
        ("GET", ACTION_PATH),
        ("GET", REBALANCE_PATH),
    ]
    assert asked[0].headers == {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    assert asked[1].headers == asked[2].headers == {"X-aws-ec2-metadata-token": "t1"}
    assert finding == Finding()
    asked, _ = looked(cloud, nothing, nothing)
    assert [one.method for one in asked] == ["GET", "GET"]


def test_an_expired_token_of_aws_is_drawn_anew_once() -> None:
    cloud, nothing = Aws(), Answer(404)
    looked(cloud, Answer(200, b"t1"), nothing, nothing)
    asked, _ = looked(cloud, Answer(401), Answer(200, b"t2"), nothing, nothing)
    assert [one.headers.get("X-aws-ec2-metadata-token") for one in asked] == ["t1", None, "t2", "t2"]
    with pytest.raises(ProtocolError, match="status 401"):
        looked(cloud, Answer(401), Answer(200, b"t3"), Answer(401))


def test_aws_notices_with_its_own_deadline_and_a_rebalance_is_only_advice() -> None:
    action = b'{"action": "terminate", "time": "2026-01-01T00:02:00Z"}'
    _, finding = looked(Aws(), Answer(200, b"t"), Answer(200, action))
    assert finding.notice is not None
    assert (finding.notice.seconds, finding.notice.reason) == (120.0, "AWS will terminate the instance")
    _, finding = looked(Aws(), Answer(200, b"t"), Answer(404), Answer(200, b'{"noticeTime": "2026-01-01T00:00:00Z"}'))
    assert finding.notice is None
    assert "rebalance" in finding.advice


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
)
def test_aws_answers(body: bytes, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ProtocolError, match="spot/instance-action"):
            action_notice(body, NOW)
    else:
        assert action_notice(body, NOW).seconds == seconds


def test_google_is_asked_to_wait_for_a_change_of_what_we_know() -> None:
    cloud = Gcp()
    (first,), finding = looked(cloud, Answer(200, b"FALSE\n", "e1"))
    assert first.headers == {"Metadata-Flavor": "Google"}
    assert first.wait_s > 0
    assert "last_etag=0" in first.path, "what nobody has as its tag is answered at once"
    assert finding == Finding()
    (second,), finding = looked(cloud, Answer(200, b"TRUE", "e2"))
    assert "wait_for_change=true" in second.path
    assert "last_etag=e1" in second.path, "a change between two questions is not missed"
    assert finding.notice is not None
    assert finding.notice.seconds == NOTICE_S
    with pytest.raises(ProtocolError, match="neither TRUE nor FALSE"):
        preemption_notice(b"<html>")
    with pytest.raises(ProtocolError, match="status 403"):
        looked(Gcp(), Answer(403))


def event(kind: str, machine: str = "vm-1", before: str = "Thu, 01 Jan 2026 00:00:30 GMT") -> str:
    return f'{{"EventId": "1", "EventType": "{kind}", "Resources": ["vm-0", "{machine}"], "NotBefore": "{before}"}}'


def events(*some: str) -> bytes:
    return f'{{"DocumentIncarnation": 1, "Events": [{", ".join(some)}]}}'.encode()


def test_azure_asks_once_who_it_is() -> None:
    cloud = Azure()
    asked, finding = looked(cloud, Answer(200, b"vm-1"), Answer(200, events()))
    assert [one.path for one in asked] == [NAME_PATH, EVENTS_PATH]
    assert {one.headers["Metadata"] for one in asked} == {"true"}
    assert finding == Finding()
    asked, finding = looked(cloud, Answer(200, events(event("Preempt"))))
    assert [one.path for one in asked] == [EVENTS_PATH]
    assert finding.notice is not None
    assert (finding.notice.seconds, finding.notice.reason) == (30.0, "Azure: Preempt is scheduled")


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
)
def test_azure_events(body: bytes, seconds: float | None) -> None:
    notice = event_notice(body, "vm-1", NOW)
    assert (None if notice is None else notice.seconds) == seconds


@pytest.mark.parametrize("body", [b"", b"[]", b'{"Events": 1}', events(event("Preempt", before="soon"))])
def test_what_azure_does_not_say(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="scheduledevents"):
        event_notice(body, "vm-1", NOW)
