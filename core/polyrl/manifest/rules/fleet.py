"""Rules about where and on what a job runs: engines, fleet, trainer, money, failures, faults, ports, storage."""

from __future__ import annotations

from typing import Final

from polyrl.manifest.rollout import CapacityPolicy, EngineType
from polyrl.manifest.rules.rule import SAMPLES, Rule, samples
from polyrl.manifest.scaling import Objective
from polyrl.manifest.trainer import TrainerBackend

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


FLEET_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "engine-model",
        "rollout.engine.type",
        "SGLang loads a folder (recipe.model.path); a model made from config needs type embedded",
        lambda s: not samples(s) or s.rollout.engine.type is not EngineType.SGLANG or s.recipe.model.config is None,
        f"!({SAMPLES}) || self.rollout.engine.type != 'sglang' || !has(self.recipe.model.config)",
    ),
    Rule(
        "response-fits",
        "recipe.sampling.maxNewTokens",
        "{recipe.sampling.maxNewTokens} leaves no room for a prompt in rollout.engine.maxContext"
        " ({rollout.engine.maxContext})",
        lambda s: not samples(s) or s.recipe.sampling.max_new_tokens < s.rollout.engine.max_context,
        f"!({SAMPLES}) || self.recipe.sampling.maxNewTokens < self.rollout.engine.maxContext",
    ),
    Rule(
        "cache-fits",
        "rollout.engine.kvTokens",
        "{rollout.engine.kvTokens} cannot hold one sequence of maxContext ({rollout.engine.maxContext}) tokens",
        lambda s: (
            s.rollout.engine.type is not EngineType.EMBEDDED
            or s.rollout.engine.kv_tokens >= s.rollout.engine.max_context
        ),
        "self.rollout.engine.type != 'embedded' || self.rollout.engine.kvTokens >= self.rollout.engine.maxContext",
    ),
    Rule(
        "replicas-ordered",
        "rollout.maxReplicas",
        "{rollout.maxReplicas} is less than minReplicas ({rollout.minReplicas})",
        lambda s: s.rollout.min_replicas <= s.rollout.max_replicas,
        "self.rollout.minReplicas <= self.rollout.maxReplicas",
    ),
    Rule(
        "someone-generates",
        "rollout.maxReplicas",
        "0 rollouts and no trainer.reservedEngine: nothing would generate",
        lambda s: not samples(s) or s.trainer.reserved_engine or s.rollout.max_replicas > 0,
        f"!({SAMPLES}) || self.trainer.reservedEngine || self.rollout.maxReplicas > 0",
    ),
    Rule(
        "base-fits",
        "rollout.capacity.baseOnDemand",
        "{rollout.capacity.baseOnDemand} is more than maxReplicas ({rollout.maxReplicas})",
        lambda s: s.rollout.capacity.base_on_demand <= s.rollout.max_replicas,
        "self.rollout.capacity.baseOnDemand <= self.rollout.maxReplicas",
    ),
    Rule(
        "base-used",
        "rollout.capacity.baseOnDemand",
        "means nothing with policy OnDemand, where every rollout is on-demand",
        lambda s: s.rollout.capacity.policy is not CapacityPolicy.ON_DEMAND or s.rollout.capacity.base_on_demand == 0,
        "self.rollout.capacity.policy != 'OnDemand' || self.rollout.capacity.baseOnDemand == 0",
    ),
    Rule(
        "fallback-used",
        "rollout.capacity.fallback.enabled",
        "needs policy SpotPreferred; policy is {rollout.capacity.policy}",
        lambda s: not s.rollout.capacity.fallback.enabled or s.rollout.capacity.policy is CapacityPolicy.SPOT_PREFERRED,
        "!self.rollout.capacity.fallback.enabled || self.rollout.capacity.policy == 'SpotPreferred'",
    ),
    Rule(
        "manager-known",
        "manager.url",
        "trainer.backend External needs the URL of its manager",
        lambda s: s.trainer.backend is not TrainerBackend.EXTERNAL or s.manager.url is not None,
        "self.trainer.backend != 'External' || has(self.manager.url)",
    ),
    Rule(
        "manager-derived",
        "manager.url",
        "is only for trainer.backend External; with {trainer.backend} the operator derives it",
        lambda s: s.trainer.backend is TrainerBackend.EXTERNAL or s.manager.url is None,
        "self.trainer.backend == 'External' || !has(self.manager.url)",
    ),
    Rule(
        "budget-given",
        "scaling.budgetPerHour",
        "objective ThroughputUnderBudget needs a budget",
        lambda s: s.scaling.objective is not Objective.THROUGHPUT_UNDER_BUDGET or s.scaling.budget_per_hour is not None,
        "self.scaling.objective != 'ThroughputUnderBudget' || has(self.scaling.budgetPerHour)",
    ),
    Rule(
        "budget-used",
        "scaling.budgetPerHour",
        "is only kept by objective ThroughputUnderBudget; objective is {scaling.objective}",
        lambda s: s.scaling.objective is Objective.THROUGHPUT_UNDER_BUDGET or s.scaling.budget_per_hour is None,
        "self.scaling.objective == 'ThroughputUnderBudget' || !has(self.scaling.budgetPerHour)",
    ),
    Rule(
        "prices-given",
        "scaling.objective",
        "{scaling.objective} weighs money: it needs pricing.spotPerHour and pricing.onDemandPerHour",
        lambda s: (
            s.scaling.objective is Objective.THROUGHPUT
            or (s.pricing.spot_per_hour is not None and s.pricing.on_demand_per_hour is not None)
        ),
        "self.scaling.objective == 'Throughput'"
        " || (has(self.pricing.spotPerHour) && has(self.pricing.onDemandPerHour))",
    ),
    Rule(
        "failure-rule-matches",
        "failurePolicy.rules",
        "each rule has exactly one of onExitCodes and onPodConditions",
        lambda s: all((r.on_exit_codes is None) != (r.on_pod_conditions is None) for r in s.failure_policy.rules),
        "self.failurePolicy.rules.all(r, has(r.onExitCodes) != has(r.onPodConditions))",
    ),
    Rule(
        "faults-happen",
        "faultInjection",
        "a fault is only injected in modes rl and sft+rl, at an atStep of at most algorithm.steps"
        " ({recipe.algorithm.steps}), on a rollout below maxReplicas ({rollout.maxReplicas})",
        lambda s: all(
            samples(s) and f.at_step <= s.recipe.algorithm.steps and f.rollout < s.rollout.max_replicas
            for f in s.fault_injection
        ),
        f"self.faultInjection.all(f, {SAMPLES}"
        " && f.atStep <= self.recipe.algorithm.steps && f.rollout < self.rollout.maxReplicas)",
    ),
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
