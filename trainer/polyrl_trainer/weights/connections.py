"""The connections of the publisher's socket: how many there are, and whose unfinished messages fill the trainer."""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from polyrl.wire.unfinished import TCP_INFO_BYTES, UnfinishedMessages, received_bytes

WAIT_MS: Final = 1000
"""Longest wait of who serves, where the kernel does not tell what came."""

log = structlog.get_logger(__name__)


class Connections:
    """Of one socket that is not bound yet; `monitor` is to be polled with it."""

    def __init__(self, of: zmq.Socket[bytes], max_unfinished_bytes: int) -> None:
        self._of, self._messages = of, UnfinishedMessages(max_unfinished_bytes)
        self._due = 0.0
        self.monitor: zmq.Socket[bytes] = of.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def __len__(self) -> int:
        """Shaken hands with or not."""
        return len(self._messages.connections)

    @property
    def wait_ms(self) -> int:
        """Until the next check at the latest."""
        return int(1000 * self._messages.check_s) if sys.platform == "linux" else WAIT_MS

    def take_event(self) -> None:
        """Reads what the monitor tells."""
        event = parse_monitor_message(self.monitor.recv_multipart())
        is_new = event["event"] == zmq.EVENT_ACCEPTED
        (self._messages.opened if is_new else self._messages.closed)(event["value"])

    def handed_over(self, frame: zmq.Frame) -> None:
        """The last part of a message was read."""
        self._messages.handed_over(int(frame.get(zmq.SRCFD)))

    def check(self, now: float, *, drained: bool) -> None:
        """Cuts off those who send messages without an end. `drained`: no message waits to be read."""
        if now < self._due or sys.platform != "linux":
            return
        self._due = now + self._messages.check_s
        received = {each: _received(each) for each in self._messages.connections}
        for connection in self._messages.check(received, drained=drained):
            log.warning("cut off: a receiver of weights that sends a request without an end", peer=_shut(connection))

    def close(self) -> None:
        # First: libzmq waits for whoever should read of a connection's end, and nobody does any more.
        self._of.disable_monitor()
        self.monitor.close(linger=0)


def _received(connection: int) -> int:
    """Bytes, by the kernel; 0 where that connection has ended, and the monitor has not said so yet."""
    try:
        with socket.socket(fileno=os.dup(connection)) as peer:
            return received_bytes(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
    except OSError:
        return 0


def _shut(connection: int) -> str:
    """Ends a TCP connection that is libzmq's, which sees it end; gives the other side's address."""
    try:
        with socket.socket(fileno=os.dup(connection)) as peer:
            address = str(peer.getpeername())
            peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        return "gone"
    return address
