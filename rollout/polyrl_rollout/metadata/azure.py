"""Azure: scheduled events of the whole scale set; those count that name this machine. A spot machine hears 30 s ahead.

    GET instance/compute/name      this machine, asked once
    GET scheduledevents            {"Events": [{"EventType": "Preempt", "Resources": [...], "NotBefore": ...}]}

The first question switches the service on, which may take two minutes. Read next: `watcher`.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Final

import msgspec

from polyrl.errors import UNDECODABLE, ProtocolError
from polyrl_rollout.metadata.asking import Finding, Look, Notice, Question, expect

NAME_PATH: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS_PATH: Final = "/metadata/scheduledevents?api-version=2020-07-01"
HEADERS: Final = {"Metadata": "true"}
PAUSE_S: Final = 2.0
"""Azure advises a second; of its half minute, two are little."""
GOODBYES: Final = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events after which nothing that runs now is there; Freeze lasts seconds."""


class _Event(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    not_before: str = ""
    """RFC 1123; empty once it has begun."""


class _Events(msgspec.Struct, rename="pascal"):
    events: list[_Event] = []


class Azure:
    """One virtual machine."""

    pause_s: float = PAUSE_S

    def __init__(self) -> None:
        self._name = ""

    def look(self, now: float) -> Look:
        if not self._name:
            answer = yield Question(NAME_PATH, HEADERS)
            self._name = expect(answer, NAME_PATH, 200).body.decode("utf-8", "replace").strip()
        answer = yield Question(EVENTS_PATH, HEADERS)
        return Finding(notice=event_notice(expect(answer, EVENTS_PATH, 200).body, self._name, now))


def event_notice(body: bytes, machine: str, now: float) -> Notice | None:
    """The first end that awaits `machine`, at `now` (Unix seconds). Raises ProtocolError."""
    try:
        events = msgspec.json.decode(body, type=_Events).events
    except UNDECODABLE as error:
        raise ProtocolError(f"{EVENTS_PATH}: {error}") from None
    ends = [event for event in events if event.event_type in GOODBYES and machine in event.resources]
    notices = [Notice(_seconds(event, now), f"Azure: {event.event_type} is scheduled") for event in ends]
    return min(notices, key=lambda notice: notice.seconds, default=None)


def _seconds(event: _Event, now: float) -> float:
    if not event.not_before:
        return 0.0
    try:
        return max(0.0, parsedate_to_datetime(event.not_before).timestamp() - now)
    except ValueError as error:
        raise ProtocolError(f"{EVENTS_PATH}: {error}") from None
