"""Rules about what a job's pods keep and where they listen."""

from __future__ import annotations

from typing import Final

from polyrl.manifest.rules.rule import Rule

OWN_PORTS: Final = (5001, 5002, 5003)
"""Agents, trainer, weights: where our processes listen inside pods (see `cluster.names`)."""


def _one_source(role: str) -> Rule:
    storage = f"{role}.storage"
    return Rule(
        f"{role}-storage-kept",
        f"{storage}.claimName",
        "names a claim, and ephemeral wants none; leave one of the two away",
        lambda s: not (getattr(s, role).storage.ephemeral and getattr(s, role).storage.claim_name is not None),
        f"!(self.{storage}.ephemeral && has(self.{storage}.claimName))",
    )


def _class_used(role: str) -> Rule:
    storage = f"{role}.storage"
    return Rule(
        f"{role}-storage-class-used",
        f"{storage}.storageClassName",
        "is of a claim that the operator makes; with claimName or ephemeral it makes none",
        lambda s: (
            getattr(s, role).storage.storage_class_name is None
            or not (getattr(s, role).storage.ephemeral or getattr(s, role).storage.claim_name is not None)
        ),
        f"!has(self.{storage}.storageClassName) || !(self.{storage}.ephemeral || has(self.{storage}.claimName))",
    )


POD_RULES: Final[tuple[Rule, ...]] = (
    _one_source("trainer"),
    _one_source("manager"),
    _class_used("trainer"),
    _class_used("manager"),
    Rule(
        "port-free",
        "manager.port",
        "{manager.port} is taken: 5001 is for agents, 5002 for the trainer, 5003 for weights",
        lambda s: s.manager.port not in OWN_PORTS,
        "!(self.manager.port in [5001, 5002, 5003])",
    ),
    Rule(
        "code-from-one-source",
        "recipe.code",
        "comes from configMap or from volumeClaim, not from both",
        lambda s: s.recipe.code.config_map is None or s.recipe.code.volume_claim is None,
        "!(has(self.recipe.code.configMap) && has(self.recipe.code.volumeClaim))",
    ),
)
