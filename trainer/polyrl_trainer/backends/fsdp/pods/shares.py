"""What the first pod asks the others about their shares of weight versions, and how it gets there.

Each other pod dials the first one several times, so that it is asked several things at once: a chunk to be passed on
does not wait for a delta to be encoded. A connection that broke, or on which an answer did not come, is made anew, and
what was asked on it is asked on another one: to be asked twice changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from polyrl.errors import PolyRLError, ProtocolError, RunFailed
from polyrl_trainer.backends.fsdp.pods.link import PodLink
from polyrl_trainer.backends.fsdp.pods.messages import ShareMessage

CONNECTIONS: Final = 6
"""Connections of each pod: one for what is published, one for what is copied, one for each chunk that is passed on."""
COME_S: Final = 60.0
"""For a pod that has come to dial for these, too."""
SHARE_REDIAL_S: Final = 1.0
AGAIN_S: Final = 20.0
"""For one to come once another has broken: a pod notices that a network is gone a little later, and dials again."""
MOMENT_S: Final = 0.01
"""What is left of the time for an answer, at the least: no time at all means something else to a socket."""
DONE, FAILED = b"+", b"-"
"""First byte of an answer, before what was asked for or why it cannot be had."""

log = structlog.get_logger()


class PodShare(Protocol):
    """A pod's share of versions."""

    endpoint: str
    """Where it answers receivers."""

    def answer(self, request: bytes) -> bytes:
        """From any thread."""


class ShareLinks:
    """The first pod's side."""

    def __init__(self, number: int) -> None:
        """`number`: how many other pods there are, which are counted from 1."""
        self.number = number
        self._free: list[list[PodLink]] = [[] for _ in range(number)]
        self._endpoints: dict[int, str] = {}
        self._changed = threading.Condition()
        self._over = False

    def add(self, message: ShareMessage, link: PodLink) -> None:
        """A pod has dialled, perhaps in place of some that have broken."""
        link.keep_alive()
        with self._changed:
            self._endpoints[message.pod] = message.endpoint
            free = self._free[message.pod - 1]
            for broken in [one for one in free if one.has_ended()]:
                free.remove(broken)
                broken.close()
        self._give_back(message.pod - 1, link)

    def endpoints(self) -> tuple[str, ...]:
        """See `OtherMachines`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._endpoints) == self.number, COME_S):
                raise TimeoutError(f"not all pods have said within {COME_S:g} s where they serve weights")
            return tuple(self._endpoints[pod] for pod in range(1, self.number + 1))

    def ask(self, machine: int, request: bytes, within_s: float) -> bytes:
        """See `OtherMachines`."""
        until, come_s = time.monotonic() + within_s, COME_S
        while True:
            link = self._take(machine, min(come_s, until - time.monotonic()))
            try:
                link.send_bytes(request, max(MOMENT_S, until - time.monotonic()))
                answer = link.next_bytes(max(MOMENT_S, until - time.monotonic()))
                break
            except (OSError, ProtocolError) as error:
                link.close()  # what comes late would answer the next question
                if time.monotonic() >= until:
                    raise ConnectionAbortedError(f"pod {machine + 1} did not answer about weights: {error}") from error
                log.info("a connection for weights has broken", pod=machine + 1, reason=str(error))
                come_s = AGAIN_S
        self._give_back(machine, link)
        if answer[:1] != DONE:
            raise RunFailed(f"pod {machine + 1} of the trainer: {answer[1:].decode(errors='replace')}")
        return answer[1:]

    def close(self) -> None:
        """Ends those that nobody waits on; none is waited for any more."""
        with self._changed:
            self._over = True
            for free in self._free:
                while free:
                    free.pop().close()
            self._changed.notify_all()

    def _take(self, machine: int, within_s: float) -> PodLink:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._free[machine], within_s)
            if not self._free[machine]:
                raise TimeoutError(f"no connection to pod {machine + 1} is free")
            return self._free[machine].pop()

    def _give_back(self, machine: int, link: PodLink) -> None:
        with self._changed:
            if self._over:
                link.close()
            else:
                self._free[machine].append(link)
                self._changed.notify_all()


class ShareAnswers:
    """The side of another pod: dials from now on, and answers what it is asked until it is closed."""

    def __init__(self, dial: Callable[[], PodLink], pod: int, share: PodShare) -> None:
        self._dial, self._message, self._share = dial, ShareMessage(pod, share.endpoint), share
        self._over = threading.Event()
        for _ in range(CONNECTIONS):
            threading.Thread(target=self._run, name="share-answers", daemon=True).start()

    def close(self) -> None:
        """What is being answered is finished."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                link = self._dial()
                try:
                    link.keep_alive()
                    link.send(self._message)
                    while True:
                        link.send_bytes(self._answer(link.next_bytes()))
                finally:
                    link.close()
            except (OSError, PolyRLError) as error:
                log.debug("a connection for weights has ended", reason=str(error))
            self._over.wait(SHARE_REDIAL_S)

    def _answer(self, request: bytes) -> bytes:
        try:
            return DONE + self._share.answer(request)
        except Exception as error:
            log.exception("a share of weights failed")
            return FAILED + f"{type(error).__name__}: {error}".encode()
