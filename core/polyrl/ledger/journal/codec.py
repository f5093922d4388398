"""Events and states as bytes: what a journal writes and reads back. msgpack, typed; nothing else is accepted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from polyrl.errors import ProtocolError
from polyrl.ledger.events import AnyEvent, Event
from polyrl.ledger.state import LedgerState

JOURNAL_SCHEMA: Final = 8
"""Changes with any change to events or state that old bytes would not survive, or to the history that an
audit would miss; a journal of another one is refused."""

_encoder = msgspec.msgpack.Encoder()
_events = msgspec.msgpack.Decoder(list[AnyEvent])
_state = msgspec.msgpack.Decoder(LedgerState)


def encode_events(events: Iterable[Event]) -> bytes:
    """The durable ones among `events`; empty bytes when there is none."""
    durable = [event for event in events if event.durable]
    return _encoder.encode(durable) if durable else b""


def decode_events(data: bytes) -> list[Event]:
    """Raises ProtocolError."""
    try:
        return _events.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"undecodable events: {error}") from error


def encode_state(state: LedgerState) -> bytes:
    """A snapshot, with all that the state holds; a journal writes that of what is not in pages yet (see `pages`)."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> LedgerState:
    """Raises ProtocolError."""
    try:
        return _state.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"undecodable snapshot: {error}") from error
