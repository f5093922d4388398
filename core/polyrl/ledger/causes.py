"""Why assignments end unfinished, why engines pause or sleep, and how they leave."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class MoveCause(StrEnum):
    """Why an assignment ends unfinished."""

    LOST = "lost"
    """Its engine vanished."""
    DRAINING = "draining"
    """Its engine drains, and hands it back or has no time left."""
    STALLED = "stalled"
    """No token for too long."""
    ENGINE_ERROR = "engineError"
    """Its engine failed at it, ended it too soon, or gave it back for a reason that this version does not know."""
    REJECTED = "rejected"
    """Its engine refused the sample itself."""
    VERSION_CHANGED = "versionChanged"
    """Its engine changed its weights to a version that may not generate."""
    WRONG_VERSION = "wrongVersion"
    """Its engine sent tokens of a version that may not generate."""
    WRONG_TOKENS = "wrongTokens"
    """Its engine sent other tokens than before."""
    NOT_HELD = "notHeld"
    """Its engine no longer had it when it greeted again."""
    WINDOW = "window"
    """The reserved window closed."""
    REBALANCED = "rebalanced"
    """Another engine will be faster."""
    OUTGROWN = "outgrown"
    """It has filled its engine's context, and another engine's is longer."""


AVOIDED_CAUSES: Final = frozenset(MoveCause(one) for one in ("stalled", "engineError", "wrongVersion", "wrongTokens"))
"""Failures at a sample that the same engine may repeat. Refusals have a memory of their own."""


class QuarantineCause(StrEnum):
    """Why an engine gets no work for a while; all but the last two as in MoveCause."""

    DRAINING = MoveCause.DRAINING
    """It gave a sample back as if it drained, and did not say that it drains."""
    STALLED = MoveCause.STALLED
    """It gave no token for too long."""
    ENGINE_ERROR = MoveCause.ENGINE_ERROR
    """It failed at a sample."""
    REJECTED = MoveCause.REJECTED
    """It refused everything that it got last."""
    VERSION_CHANGED = MoveCause.VERSION_CHANGED
    """It no longer serves what it had loaded, or serves it again."""
    WRONG_VERSION = MoveCause.WRONG_VERSION
    """It sent tokens of a version that may not generate."""
    WRONG_TOKENS = MoveCause.WRONG_TOKENS
    """It sent other tokens than before."""
    RETURNED = "returned"
    """It had gone silent, and is back."""
    DEPARTED = "departed"
    """Its tokens are others than the fleet's, see `measures.departures`."""


class GoneCause(StrEnum):
    """How an engine's lease ended."""

    DEREGISTERED = "bye"
    """It said that it leaves."""
    SILENT = "silent"
    """It gave no sign of life for `lost_s`."""
    AWAKE = "awake"
    """It did not sleep when the learner needed its device."""
    ASLEEP = "asleep"
    """It did not wake when it was to generate again."""


class RestPhase(StrEnum):
    """Where one engine is between awake and asleep."""

    AWAKE = "awake"
    """It holds memory of its device."""
    FALLING = "falling"
    """It was ordered to sleep: it takes nothing new, and gives back what it runs."""
    ASLEEP = "asleep"
    """The device is the learner's."""
    WAKING = "waking"
    """It was ordered to wake, and has no weights yet."""
