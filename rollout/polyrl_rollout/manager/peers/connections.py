"""The connections of the agents' socket, by the kernel: whose unfinished messages fill the manager."""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from polyrl.wire.unfinished import TCP_INFO_BYTES, UnfinishedMessages, received_bytes

log = structlog.get_logger(__name__)


class AgentConnections:
    """The connections of a socket, and what the kernel knows of them."""

    can_be_seen: Final = sys.platform == "linux"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], of: zmq.Socket[bytes], max_bytes: int) -> None:
        """`of` must not be bound yet."""
        self.messages, self._of = UnfinishedMessages(max_bytes), of
        endpoint = f"inproc://connections-{id(of)}"
        of.monitor(endpoint, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = context.socket(zmq.PAIR)
        # Without a bound: libzmq waits where there is no room for what it has to tell, and meanwhile serves nobody.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(endpoint)

    def check(self, *, drained: bool) -> int:
        """How many were cut off. `drained`: all whole messages have been read."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            is_new = event["event"] == zmq.EVENT_ACCEPTED
            (self.messages.opened if is_new else self.messages.closed)(event["value"])
        received = {each: _received(each) for each in self.messages.connections}
        cut = self.messages.check(received, drained=drained)
        for connection in cut:
            self.messages.closed(connection)
            log.warning("cut off: a peer that sends a message without an end", peer=_shut(connection))
        return len(cut)

    def close(self) -> None:
        self._of.disable_monitor()
        self._monitor.close(linger=0)


def _received(connection: int) -> int:
    """Bytes, by the kernel; 0 where that connection has ended, and the monitor has not said so yet."""
    try:
        peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=connection)
    except OSError:
        return 0
    try:
        return received_bytes(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))
    except OSError:
        return 0
    finally:
        peer.detach()


def _shut(connection: int) -> str:
    """Ends a TCP connection that is libzmq's, which sees it end; gives the other side's address."""
    try:
        with socket.socket(fileno=os.dup(connection)) as peer:
            address = str(peer.getpeername())
            peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        return "gone"
    return address
