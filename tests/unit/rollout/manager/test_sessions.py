"""What the manager's agents' sessions sends of what the ledger said."""

from __future__ import annotations

from typing import cast

from polyrl.wire import Cancel, Resend, ToAgent, TokensKept, decode_to_agent
from polyrl_rollout.manager.sessions import AgentSessions, Router, Sent


class Outgoing:
    """A router that only remembers."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, ToAgent]] = []

    def send(self, identity: bytes, frame: bytes) -> Sent:
        self.sent.append((identity.decode(), decode_to_agent(frame)))
        return Sent.QUEUED


def test_of_the_answers_to_one_engines_tokens_the_last_is_sent_and_all_else_in_order() -> None:
    outgoing = Outgoing()
    sessions = AgentSessions(cast(Router, outgoing), lambda engine, message: None)
    one, two = "one", "two"
    sessions.send_all(
        [(one, TokensKept(1)), (two, TokensKept(9)), (one, Cancel(4)), (one, TokensKept(2)), (two, Resend(7, 0))]
    )
    assert outgoing.sent == [(two, TokensKept(9)), (one, Cancel(4)), (one, TokensKept(2)), (two, Resend(7, 0))]
