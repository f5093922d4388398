"""Facts and states as bytes: what a journal writes and reads back. msgpack, typed; nothing else is accepted.

Refuses to hold: files, durability (see whoever keeps the journal). Read next: `fold`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from polyrl.errors import ProtocolError
from polyrl.ledger.events import Fact
from polyrl.ledger.state import State

JOURNAL_SCHEMA: Final = 7
"""Changes with any change to facts or state that old bytes would not survive, and with records that an audit would
miss in an old journal; another one is refused."""

_encoder = msgspec.msgpack.Encoder()
_facts = msgspec.msgpack.Decoder(list[Fact])
_state = msgspec.msgpack.Decoder(State)


def encode_facts(facts: Iterable[Fact]) -> bytes:
    """The durable ones among `facts`; empty bytes when there is none."""
    durable = [fact for fact in facts if fact.durable]
    return _encoder.encode(durable) if durable else b""


def decode_facts(data: bytes) -> list[Fact]:
    """Raises ProtocolError."""
    try:
        return _facts.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"undecodable facts: {error}") from error


def encode_state(state: State) -> bytes:
    """A snapshot, with all that the state holds; a journal writes that of what is not in pages yet (see `pages`)."""
    return _encoder.encode(state)


def decode_state(data: bytes) -> State:
    """Raises ProtocolError."""
    try:
        return _state.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"undecodable snapshot: {error}") from error
