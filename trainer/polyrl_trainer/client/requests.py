"""PendingRequests that await their answers: numbered, each with a deadline, sent again after every greeting.

Refuses to hold: sockets (see `client_link`). Read next: `client`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from polyrl.errors import DeadlineExceeded, RunFailed
from polyrl.wire import Accepted, Batch, Declined, FromTrainer, Late

Answer: TypeAlias = Accepted | Declined | Batch | Late


class RequestRefused(RunFailed):
    """The manager will not do it; the message is its sentence."""


@dataclass(frozen=True)
class _PendingRequest:
    message: FromTrainer
    answer: asyncio.Future[Answer]


class PendingRequests:
    """What has been asked and not been answered."""

    def __init__(self, send: Callable[[FromTrainer], None]) -> None:
        self._send = send
        # A trainer that starts again must not ask under a number of its former life: the manager repeats old answers.
        self._next_number = secrets.randbits(48)
        self._open: dict[int, _PendingRequest] = {}
        self._failure: Exception | None = None

    async def ask(self, make: Callable[[int], FromTrainer], what: str, timeout_s: float) -> Answer:
        """The answer to `make(number)`. Raises RequestRefused, DeadlineExceeded, or what ended the connection."""
        if self._failure is not None:
            raise self._failure
        self._next_number += 1
        number = self._next_number
        request = _PendingRequest(make(number), asyncio.get_running_loop().create_future())
        self._open[number] = request
        self._send(request.message)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await request.answer
        except TimeoutError:
            raise DeadlineExceeded(f"the answer to {what}", "the manager", timeout_s) from None
        finally:
            del self._open[number]
        if isinstance(answer, Declined):
            raise RequestRefused(f"{what} was refused: {answer.reason}")
        return answer

    def take(self, answer: Answer) -> None:
        """Hands an answer to who asked; a second answer is dropped."""
        request = self._open.get(answer.request)
        if request is not None and not request.answer.done():
            request.answer.set_result(answer)

    def send_again(self) -> None:
        """Sends everything unanswered, in the order it was asked."""
        for request in self._open.values():
            self._send(request.message)

    def fail(self, error: Exception) -> None:
        """Nothing will be answered any more."""
        self._failure = error
        for request in self._open.values():
            if not request.answer.done():
                request.answer.set_exception(error)
