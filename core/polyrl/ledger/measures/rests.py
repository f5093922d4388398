"""Engines that share the trainer's devices and sleep while it learns: what each does now, and what it takes.

    awake -- GoToSleep --> falling -- Asleep --> asleep -- WakeUp --> waking -- weights loaded --> awake

An engine that has not started yet is asleep: it holds nothing of its device.
"""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

from polyrl.ledger.causes import RestPhase

GIVE_UP_S: Final = 90.0
"""From an order to sleep until the engine counts as ended: its agent has 75 s, and the rest is for a process to go. One
that is silent may hold its device's memory for as long."""


class Rest(msgspec.Struct):
    """Where one engine is between awake and asleep, and what it was ordered."""

    able: bool = False
    """It takes the orders."""
    phase: RestPhase = RestPhase.AWAKE
    since: float = 0.0
    due: float = inf
    """When an order must have been followed."""
    order: int = 0
    """Number of the last order to sleep."""


class RestSeconds(msgspec.Struct):
    """What counts for all such engines: what was measured, what was ordered, and when waking is looked at again."""

    sleep_s: float = 0.0
    """From GoToSleep to Asleep; 0: not measured."""
    wake_s: float = 0.0
    """From WakeUp until the weights are loaded; 0: not measured."""
    next_try_at: float = -inf
    orders: int = 0
    """Orders to sleep so far, to anybody: an engine whose lease ended does not count from 1 again."""
