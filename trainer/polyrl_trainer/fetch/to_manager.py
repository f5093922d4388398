"""Reports to the manager how much of the model has come; one that is away hears the next report.

Pattern: DEALER with the trainer's pair; the manager binds, we dial, and its key is pinned. It sends nothing back.

    direction   high-water mark   when full
    send        1                 the report is dropped after SEND_MS: the next one says more
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog
import zmq

from polyrl import wire
from polyrl.control import may_be_ipv6, parse_endpoints
from polyrl.errors import InvalidData
from polyrl.keys import TrainerKeys, read_keys

log = structlog.get_logger()

SEND_MS: Final = 2_000
"""Longest wait for a connection: a handshake takes milliseconds, and a name may have to be asked for."""


class ToManager:
    """Connection of one run's fetch to the manager. For one thread."""

    def __init__(self, endpoints: Path, keys: Path) -> None:
        self._endpoints, self._keys = endpoints, keys
        self._socket: zmq.Socket[bytes] | None = None

    def report(self, report: wire.FetchReport) -> None:
        """Raises nothing: a fetch without a listener is a fetch all the same."""
        try:
            self._socket = self._socket or self._dial()
            self._socket.send(wire.encode(report))
        except (OSError, ValueError, InvalidData, zmq.ZMQError) as error:
            log.warning("how much has come could not be reported to the manager", reason=str(error))

    def close(self) -> None:
        """What is not sent is dropped."""
        if self._socket is not None:
            self._socket.close(linger=0)

    def _dial(self) -> zmq.Socket[bytes]:
        endpoint = parse_endpoints(self._endpoints.read_bytes(), str(self._endpoints)).trainer
        keys = read_keys(TrainerKeys, self._keys)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = keys.public_key.encode(), keys.secret_key.encode()
        socket.curve_serverkey = keys.manager_public_key.encode()
        for option, value in ((zmq.SNDHWM, 1), (zmq.SNDTIMEO, SEND_MS), (zmq.IMMEDIATE, 1), (zmq.LINGER, 0)):
            socket.setsockopt(option, value)
        socket.ipv6 = may_be_ipv6(endpoint)
        socket.connect(endpoint)
        return socket
