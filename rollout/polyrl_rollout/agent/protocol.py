"""The agent's side of its protocol with the manager, as plain state: no sockets, no clock, no engine.

`AgentProtocol` says which messages count, does what they ask of the tokens that are held, and makes the answers.
Whoever drives it brings the rest: the real agent (`conversation`, `app`), and in tests the simulated ones.
"""

from __future__ import annotations

from typing import Final

from polyrl.wire import Assign, Cancel, Fenced, HandBack, HandBackReason, Resend, ToAgent, TokensKept, Welcome
from polyrl_rollout.agent.tokens import Stream, TokenBook

MAX_FENCED: Final = 3


class AgentProtocol:
    """One agent's; `welcome` is None until the manager has answered the greeting."""

    def __init__(self) -> None:
        self.book = TokenBook()
        self.welcome: Welcome | None = None
        self.draining = False
        self._fenced = 0

    @property
    def is_rejected(self) -> bool:
        """Fenced so often in a row that greeting again is in vain."""
        return self._fenced >= MAX_FENCED

    def counts(self, message: ToAgent) -> bool:
        """Before the greeting is answered everything else was meant for a former connection of this name; only what
        settles held assignments always holds."""
        return self.welcome is not None or isinstance(message, Welcome | Fenced | Resend | Cancel)

    def receive(self, message: ToAgent, now: float) -> None:
        """Does what a message asks of what is held; engines, weights and drains are the driver's."""
        match message:
            case Welcome():
                self.welcome, self._fenced = message, 0
                self.book.reconnect(now)
            case Fenced():
                self.welcome = None
                self._fenced += 1
                self.book.clear()
            case TokensKept(seq):
                self.book.keep(seq)
            case Resend(assignment, offset):
                self.book.resend(assignment, offset, now)
            case Cancel(assignment):
                self.book.forget(assignment)

    def disconnect(self) -> None:
        """The connection is gone; the next one greets anew."""
        self.welcome = None

    def accept(self, assign: Assign, version: int, *, switching: bool = False) -> Stream | HandBack | None:
        """The stream to generate; or the answer why not; or None for one that is known already. `version`: the weights
        that the engine serves; `switching`: it is about to serve others."""
        objection = self._objection(assign, version, switching)
        if objection is not None:
            return HandBack(assign.assignment, *objection)
        return self.book.open(assign)

    def _objection(self, assign: Assign, version: int, switching: bool) -> tuple[HandBackReason, str] | None:
        if self.draining:
            return HandBackReason.DRAINING, "the engine drains"
        if switching or not assign.min_version <= version <= assign.max_version:
            return HandBackReason.VERSION_CHANGED, f"the engine serves version {version}"
        if assign.max_new_tokens < 1:
            return HandBackReason.REJECTED, "its token budget is used up"
        return None

    def hand_back(self, assignment: int, reason: HandBackReason, detail: str = "") -> HandBack | None:
        """Gives up an assignment, whose tokens must have been sent before; None when it is not held."""
        return None if self.book.forget(assignment) is None else HandBack(assignment, reason, detail)
