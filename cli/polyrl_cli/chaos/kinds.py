"""The faults that somebody may inflict on a live run, and the kinds of process that they hit.

    kill       SIGKILL, no notice. agent: with its engine, as a machine that vanishes; engine: what the agent started
    preempt    a notice (SIGTERM), then the end `seconds` later; an agent only
    freeze     SIGSTOP, and SIGCONT `seconds` later
    slow       stopped and continued in turn for `seconds`, so that it runs for `speed` of the time
    partition  nothing passes between an agent and the manager for `seconds`: either way, only to it, or only from it

Refuses to hold: anything that takes time to import; the command line shows these names. Read next: `faults`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

MAX_SECONDS: Final = 3600.0
"""Longest fault; whoever wants more means the end."""


class ChaosAction(StrEnum):
    """What is done."""

    KILL = "kill"
    PREEMPT = "preempt"
    FREEZE = "freeze"
    SLOW = "slow"
    PARTITION = "partition"


class Direction(StrEnum):
    """Of what a partition cuts, as the agent sees it."""

    BOTH = "both"
    IN = "in"
    """What the manager says to it is lost."""
    OUT = "out"
    """What it says is lost."""


class Target(StrEnum):
    """To what kind of process."""

    AGENT = "agent"
    """A rollout's agent and the engine that it started."""
    ENGINE = "engine"
    """That engine alone."""
    MANAGER = "manager"
    TRAINER = "trainer"
