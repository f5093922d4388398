"""Google Cloud: a spot machine hears of its end through one value, which turns from FALSE to TRUE.

    GET instance/preempted?wait_for_change=true      held back until the value is not the one of last_etag

Nobody says how long is left. Kubernetes' graceful shutdown on GKE leaves pods of users NOTICE_S.
Read next: `azure`.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from polyrl.errors import ProtocolError
from polyrl_rollout.metadata.asking import Finding, Look, Notice, Question, expect

WAIT_S: Final = 60
"""Longest that one request is held back; shorter than the idle time of anything between."""
PREEMPTED_PATH: Final = "/computeMetadata/v1/instance/preempted"
NOTICE_S: Final = 15.0
"""Half of GKE's default 30 s, the other half is for pods of the system. Pools may be given more; asking for less costs
only tokens that others generate."""


class Gcp:
    """One machine."""

    pause_s: float = 0.0
    """The cloud holds each request back itself."""

    def __init__(self) -> None:
        self._etag = "0"
        """Of the value that we know; this one, which none has, is answered at once."""

    def look(self, now: float) -> Look:
        wait = f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={quote(self._etag)}"
        answer = yield Question(PREEMPTED_PATH + wait, {"Metadata-Flavor": "Google"}, wait_s=float(WAIT_S))
        notice = preemption_notice(expect(answer, PREEMPTED_PATH, 200).body)
        self._etag = answer.etag
        return Finding(notice=notice)


def preemption_notice(body: bytes) -> Notice | None:
    """What instance/preempted says. Raises ProtocolError."""
    match body.strip():
        case b"TRUE":
            return Notice(NOTICE_S, "Google Cloud preempts the instance")
        case b"FALSE":
            return None
    raise ProtocolError(f"{PREEMPTED_PATH}: neither TRUE nor FALSE: {body[:40]!r}")
