"""The base of all messages. Read next: `agent`."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field=None):
    """A frozen msgpack array; the subclass's tag is its first item."""
