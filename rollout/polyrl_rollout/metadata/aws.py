"""AWS: instance metadata, version 2. A spot instance hears of its end two minutes ahead, as a rule.

    PUT api/token                                     token, for TOKEN_S
    GET spot/instance-action                          404, or {"action": "terminate", "time": "2026-01-01T00:02:00Z"}
    GET events/recommendations/rebalance              404, or {"noticeTime": ...}: more likely than usual, no notice

Pods reach it only where the machine's hop limit is 2 or more; elsewhere nothing answers, and other signs must do.
Read next: `gcp`.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import datetime
from typing import Final

import msgspec

from polyrl.errors import UNDECODABLE, ProtocolError
from polyrl_rollout.metadata.asking import Answer, Finding, Look, Notice, Question, expect

TOKEN_PATH: Final = "/latest/api/token"
ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_S: Final = 21_600
"""The longest that AWS gives."""
PAUSE_S: Final = 5.0
"""As AWS advises."""
UNAUTHORIZED: Final = 401
NOT_THERE: Final = 404


class _Action(msgspec.Struct):
    action: str
    time: datetime


class Aws:
    """One instance."""

    pause_s: float = PAUSE_S

    def __init__(self) -> None:
        self._token = ""

    def look(self, now: float) -> Look:
        action = yield from self._ask(ACTION_PATH)
        if action.status != NOT_THERE:
            return Finding(notice=action_notice(action.body, now))
        advice = yield from self._ask(REBALANCE_PATH)
        return Finding() if advice.status == NOT_THERE else Finding(advice="AWS recommends to rebalance")

    def _ask(self, path: str) -> Generator[Question, Answer, Answer]:
        """Asks with a token, and once more with a fresh one when the old one is refused."""
        for fresh in (not self._token, True):
            if fresh:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                answer = yield Question(TOKEN_PATH, headers, method="PUT")
                self._token = expect(answer, TOKEN_PATH, 200).body.decode("ascii", "replace")
            answer = yield Question(path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != UNAUTHORIZED:
                break
        return expect(answer, path, 200, NOT_THERE)


def action_notice(body: bytes, now: float) -> Notice:
    """What spot/instance-action says, at `now` (Unix seconds). Raises ProtocolError."""
    try:
        action = msgspec.json.decode(body, type=_Action)
    except UNDECODABLE as error:
        raise ProtocolError(f"{ACTION_PATH}: {error}") from None
    if action.time.tzinfo is None:
        raise ProtocolError(f"{ACTION_PATH}: its time names no zone")
    return Notice(max(0.0, action.time.timestamp() - now), f"AWS will {action.action} the instance")
