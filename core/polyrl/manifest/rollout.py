"""`spec.rollout`: the fleet that generates. Read next: `scaling`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from polyrl.manifest.base import Spec


class EngineType(StrEnum):
    """Which engine generates."""

    EMBEDDED = "embedded"
    """transformers' continuous batching, in a process of its own; CPU or one GPU; for tiny and small models."""
    SGLANG = "sglang"
    """Stock SGLang over HTTP."""


class Engine(Spec):
    """The engine beside each agent."""

    type: EngineType = EngineType.SGLANG
    max_running: Annotated[int, Field(ge=1, le=65536)] = 256
    """Sequences one engine runs at once."""
    kv_tokens: Annotated[int, Field(ge=64)] = 65536
    """KV-cache room of the embedded engine, in tokens; SGLang measures its own."""
    max_context: Annotated[int, Field(ge=8)] = 4096
    """Longest prompt + response, in tokens."""
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of one embedded engine."""
    args: list[str] = Field(default=[], max_length=128)
    """Further arguments of `sglang.launch_server`, as written on its command line."""


class FaultAction(StrEnum):
    """What a declared fault does."""

    KILL = "Kill"
    """SIGKILL without notice, as a spot machine that vanishes."""
    PREEMPT = "Preempt"
    """A notice, then the end `noticeSeconds` later."""


class Fault(Spec):
    """A fault that the run inflicts on itself, to show that nothing is lost. Only for drills and demonstrations."""

    at_step: Annotated[int, Field(ge=0)]
    """RL step after whose start it happens."""
    action: FaultAction
    rollout: Annotated[int, Field(ge=0)] = 0
    """Which of the live preemptible rollouts, counted from the oldest."""
    notice_seconds: Annotated[int, Field(ge=0, le=600)] = 5


class Update(Spec):
    """How a changed template reaches running rollouts."""

    type: Literal["OnDelete", "Rolling"] = "Rolling"
    max_unavailable: Annotated[int, Field(ge=1)] = 1
