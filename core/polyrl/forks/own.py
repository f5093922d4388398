"""The fork server that this process has, if it was forked itself or started one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass
class ServerLink:
    """How a fork server is asked."""

    socket: socket.socket
    loaded_in: dict[str, str]
    """The environment in which it loaded its libraries."""
    is_gone: bool = False


LOADED_IN = dict(os.environ)
"""Environment of this process, or of the one that it was forked from, since a fork keeps it."""

_kept: list[ServerLink] = []


def set_link(link: ServerLink | None) -> None:
    """From now on this process has that server; None: it has none."""
    _kept[:] = [] if link is None else [link]


def kept() -> ServerLink | None:
    """The fork server that this process may ask; None where it has none."""
    return _kept[-1] if _kept else None
