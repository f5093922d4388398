"""The faults that `polyrl chaos` knows, and the kinds of process that they hit; quick to import, for `--help`.

kill       SIGKILL, no notice. agent: with its engine, as a machine that vanishes; engine: what the agent started
preempt    a notice (SIGTERM), then the end `seconds` later; an agent only
freeze     SIGSTOP, and SIGCONT `seconds` later
slow       stopped and continued in turn for `seconds`, so that it runs for `speed` of the time
partition  nothing passes between an agent and the manager for `seconds`: either way, only to it, or only from it
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

MAX_SECONDS: Final = 3600.0
"""Longest fault; whoever wants more means the end."""


class ChaosAction(StrEnum):
    """What is done."""

    KILL = "kill"
    """Ends it without notice."""
    PREEMPT = "preempt"
    """Gives notice, and ends it later."""
    FREEZE = "freeze"
    """Stops it for a while."""
    SLOW = "slow"
    """Lets it run for a part of the time."""
    PARTITION = "partition"
    """Loses messages between an agent and the manager."""


class Direction(StrEnum):
    """Which messages a partition loses, as the agent sees it."""

    BOTH = "both"
    """Messages of either way."""
    IN = "in"
    """Messages that the manager sends to the agent."""
    OUT = "out"
    """Messages that the agent sends."""


class Target(StrEnum):
    """To what kind of process."""

    AGENT = "agent"
    """A rollout's agent and the engine that it started."""
    ENGINE = "engine"
    """That engine alone."""
    MANAGER = "manager"
    """The process that holds the ledger."""
    TRAINER = "trainer"
    """The process that trains."""


class Part(StrEnum):
    """Which of a worker's processes a signal goes to."""

    WORKER = "worker"
    """The one that was started for it."""
    BELOW = "below"
    """Those that it has started, and theirs."""
    ALL = "all"
    """The one that was started for it and those below."""
