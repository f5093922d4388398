"""Who may connect: one allow-list of CURVE public keys per socket, asked by libzmq during each handshake (ZAP, RFC 27).

A peer that is not on the list of the socket it dials never gets past its handshake, so none of its frames reaches us.
Refuses to hold: what an admitted peer may say (see `agents`, `trainer_desk`). Read next: `sockets`.
"""

from __future__ import annotations

from collections.abc import Mapping

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator


class _AllowList:
    """pyzmq's credentials provider, over one set of keys."""

    def __init__(self, public_key: str) -> None:
        self._public_key = public_key.encode()
        self.refused = 0

    def callback(self, domain: str, key: bytes) -> bool:
        """True when `key` (Z85) may enter `domain`; the name is pyzmq's."""
        admitted = key == self._public_key
        self.refused += not admitted
        return admitted


class Admission:
    """The ZAP handler of a context; it must run before the context's sockets bind."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Mapping[str, str]) -> None:
        """`allowed` maps a ZAP domain to the one public key that may enter it."""
        self._authenticator = AsyncioAuthenticator(context)
        self._lists = {domain: _AllowList(key) for domain, key in allowed.items()}
        for domain, allow_list in self._lists.items():
            self._authenticator.configure_curve_callback(domain, allow_list)

    def start(self) -> None:
        self._authenticator.start()

    def stop(self) -> None:
        self._authenticator.stop()

    def refused(self, domain: str) -> int:
        """Handshakes refused so far, for a key that is not on the list."""
        return self._lists[domain].refused
