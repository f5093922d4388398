"""Changes that a stored job may not undergo. They compare with the stored object, so they exist on a cluster only.

Pod templates are compared by the operator: CEL sees only the fields that a schema declares, and theirs are open.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from polyrl.manifest.rules.rule import TransitionRule


def _immutable(path: str, name: str = "") -> TransitionRule:
    name = name or path.rpartition(".")[2]
    return TransitionRule(
        f"{name}-fixed", path, message="cannot be changed; make a new job", cel=f"self.{path} == oldSelf.{path}"
    )


def _fixed_while_running(path: str) -> TransitionRule:
    leaf = path.rpartition(".")[2]
    return TransitionRule(
        f"{leaf}-fixed-while-running",
        path,
        message="can only be changed while the job is suspended",
        cel=f"oldSelf.suspend || self.{path} == oldSelf.{path}",
    )


def _absent_or_fixed_while_running(path: str) -> TransitionRule:
    """Rule for a field without a default that the API server could fill in."""
    same = f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || self.{path} == oldSelf.{path})"
    return replace(_fixed_while_running(path), cel=f"oldSelf.suspend || ({same})")


TRANSITIONS: Final[tuple[TransitionRule, ...]] = (
    _immutable("managedBy"),
    _immutable("manager.port"),
    _immutable("manager.storage", "manager-storage"),
    _immutable("trainer.storage", "trainer-storage"),
    _immutable("rollout.leaseSeconds"),
    _immutable("rollout.lostAfterSeconds"),
    _immutable("recipe.mode"),
    _immutable("recipe.seed"),
    _fixed_while_running("trainer.replicas"),
    _absent_or_fixed_while_running("trainer.processesPerPod"),
    _fixed_while_running("trainer.contextParallel"),
    _fixed_while_running("trainer.fsdp"),
    _fixed_while_running("trainer.capacity"),
    _fixed_while_running("trainer.reservedEngine"),
    _fixed_while_running("trainer.reservedSleep"),
    _fixed_while_running("trainer.graceSeconds"),
    _absent_or_fixed_while_running("trainer.reservedMemFraction"),
    TransitionRule(
        "deadline-only-shrinks",
        "activeDeadlineSeconds",
        message="may be set once or lowered, not raised or removed",
        cel="!has(oldSelf.activeDeadlineSeconds)"
        " || (has(self.activeDeadlineSeconds) && self.activeDeadlineSeconds <= oldSelf.activeDeadlineSeconds)",
    ),
)
