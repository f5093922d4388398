"""What all events have in common; the events themselves are in `events`."""

from __future__ import annotations

from enum import IntFlag
from typing import ClassVar

import msgspec


class FollowUp(IntFlag):
    """What must be decided anew after an event."""

    NONE = 0
    """Nothing."""
    PLACE = 1
    """Work or room appeared."""
    PACK = 2
    """A waiting BatchRequest may have its answer."""


class Event(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all events; `at` is the ledger's clock in seconds."""

    follow_up: ClassVar[FollowUp] = FollowUp.NONE
    durable: ClassVar[bool] = True
