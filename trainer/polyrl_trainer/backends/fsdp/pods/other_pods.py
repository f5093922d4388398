"""The first pod's side: every other pod dials it, says which one it is, and is then watched until the end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from polyrl.errors import DeadlineExceeded, GroupLeft, GroupLost, PolyRLError, ProtocolError
from polyrl.wire.sealing import LastingKeys
from polyrl_trainer.backends.fsdp.heartbeat import RankHeartbeat
from polyrl_trainer.backends.fsdp.pods.link import PodLink
from polyrl_trainer.backends.fsdp.pods.messages import (
    HelloMessage,
    LeavingMessage,
    LostMessage,
    OverMessage,
    PodMessage,
    ShareMessage,
    WelcomeMessage,
)
from polyrl_trainer.backends.fsdp.pods.shares import ShareLinks
from polyrl_trainer.backends.fsdp.ranks import RemoteMeeting
from polyrl_trainer.dropped_messages import DroppedMessages

log = structlog.get_logger()

MEET_S: Final = 1500.0
"""For the other pods to come: an autoscaler takes up to 900 s for a node, and an image some more. Less than they wait
for the first one (`member.DIAL_S`), so that the sentence says who is missing."""
LEAVE_S: Final = 15.0
"""For the other pods to end, once they know that all is over."""
HANDSHAKES: Final = 128
"""At a time. One more ends the oldest: a pod's takes milliseconds, a stranger's as long as he likes."""

ACCEPT_AGAIN_S: Final = 0.5
"""After a connection could not be taken."""


class OtherPods:
    """All but the first, as the first one has them."""

    def __init__(self, number: int, port: int, keys: LastingKeys) -> None:
        """Listens on `port` (0: any) of all addresses. Raises OSError when it is taken."""
        self.number = number
        self._keys = keys
        self._dialled, self._store = _listener(port), _listener(0)
        self.port: int = self._dialled.getsockname()[1]
        self._links: dict[int, PodLink] = {}
        self._ended = set[int]()
        self._changed = threading.Condition()
        self._greeted: list[socket.socket] = []
        self._refused = DroppedMessages("connections that are of no pod of this trainer")
        self._over, self._closed = False, threading.Event()
        self.shares = ShareLinks(number)
        """Links to the pods for their shares of weight versions."""

    @property
    def meeting(self) -> RemoteMeeting:
        """Where this process's ranks have their store."""
        return RemoteMeeting("localhost", self._store.getsockname()[1], listening=self._store.fileno())

    def watch(self, heartbeat: RankHeartbeat, lost: Callable[[GroupLost, bool], None]) -> None:
        """Lets them come from now on; `lost` is called, on some thread, for each loss: why, and whether it may be but
        an echo of another one."""
        self._heartbeat, self._lost = heartbeat, lost
        threading.Thread(target=self._accept, name="other-pods", daemon=True).start()

    def wait(self, within_s: float = MEET_S) -> None:
        """Until all have come. Raises DeadlineExceeded, which names those that did not, GroupLost once it is over."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._over or len(self._links) == self.number, within_s)
            if self._over:
                raise GroupLost("the group ended before all pods of the trainer had come")
            if not came:
                missing = ", ".join(str(pod) for pod in range(1, self.number + 1) if pod not in self._links)
                raise DeadlineExceeded("a message", f"pods {missing} of the trainer", within_s)

    def end_all(self, *, done: bool, kill: bool = False) -> None:
        """All of them end from here on, and are not missed."""
        with self._changed:
            self._over, links = True, list(self._links.values())
            self._changed.notify_all()
        self.shares.close()
        for link in links:
            link.send(OverMessage(done, kill=kill))

    def close(self) -> None:
        """Waits a while for those that know that it is over, so that nothing which was sent to them is lost."""
        until = time.monotonic() + LEAVE_S
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= self._links.keys(), max(0.0, until - time.monotonic()))
        self._closed.set()
        for listener in (self._dialled, self._store):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for link in self._links.values():
            link.close()

    # --- below: on threads of its own ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._dialled.accept()
            except OSError:
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                continue  # no descriptor is left: strangers' are given back in a moment
            with self._changed:
                self._greeted.append(connection)
                if len(self._greeted) > HANDSHAKES:
                    with suppress(OSError):
                        self._greeted.pop(0).shutdown(socket.SHUT_RDWR)
            try:
                threading.Thread(target=self._greet, args=(connection,), name="pod-handshake", daemon=True).start()
            except RuntimeError as error:  # no thread is left
                self._refuse(connection, error)

    def _greet(self, connection: socket.socket) -> None:
        try:
            link = PodLink.answer(connection, self._keys)
            hello = link.next()
            if not isinstance(hello, HelloMessage | ShareMessage) or not 1 <= hello.pod <= self.number:
                raise ProtocolError(f"its first message is {hello}")
        except (OSError, PolyRLError) as error:
            self._refuse(connection, error)
            return
        with self._changed:
            if connection in self._greeted:
                self._greeted.remove(connection)
        if isinstance(hello, ShareMessage):
            self.shares.add(hello, link)
        else:
            self._take_in(hello.pod, link)

    def _refuse(self, connection: socket.socket, why: Exception) -> None:
        with self._changed:
            self._refused.add(why)
            if connection in self._greeted:
                self._greeted.remove(connection)
        connection.close()

    def _take_in(self, pod: int, link: PodLink) -> None:
        with self._changed:
            again, over = pod in self._links, self._over
            if not again and not over:
                self._links[pod] = link
        if again or over:
            # Its node vanished and another took its place, before its silence was long enough.
            link.close()
            self._report(GroupLeft(f"pod {pod} of the trainer was started again"))
            return
        log.info("a pod of the trainer has come", pod=pod, of=self.number)
        link.send(WelcomeMessage(self._store.getsockname()[1]))
        name = f"pod {pod} of the trainer"
        link.listen(self._take, lambda fault: self._end(pod, fault))
        self._heartbeat.add(name, link, lambda sentence: self._report(GroupLost(sentence)))
        with self._changed:
            self._changed.notify_all()

    def _take(self, message: PodMessage) -> None:
        match message:
            case LostMessage():
                self._report(GroupLost(message.reason), echo=message.echo)
            case LeavingMessage():
                # As if it were asked itself: what was learned is saved, and all pods end.
                os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, pod: int, fault: str) -> None:
        name = f"pod {pod} of the trainer"
        self._report(GroupLost(f"{name}: {fault}") if fault else GroupLeft(f"{name} is gone"))
        with self._changed:
            self._ended.add(pod)
            self._changed.notify_all()

    def _report(self, error: GroupLost, *, echo: bool = False) -> None:
        with self._changed:
            over = self._over
        if not over:
            self._lost(error, echo)


def _listener(port: int) -> socket.socket:
    """On all of the machine's addresses, of both kinds where it has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
