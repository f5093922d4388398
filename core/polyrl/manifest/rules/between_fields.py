"""What must hold between fields: one list, read by pydantic on a laptop and by the API server as CEL.

`replicas` out of its bounds is no broken rule: it is clamped, for an autoscaler must not get an opaque refusal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from polyrl.manifest.recipe import Mode
from polyrl.manifest.rollout import CapacityPolicy, WeightSwitch
from polyrl.manifest.rules.algorithm import ALGORITHM_RULES
from polyrl.manifest.rules.data import DATA_RULES
from polyrl.manifest.rules.engine import ENGINE_RULES
from polyrl.manifest.rules.evaluation import EVALUATION_RULES
from polyrl.manifest.rules.preferences import PREFERENCE_RULES
from polyrl.manifest.rules.rule import IS_ONLINE, Rule
from polyrl.manifest.scaling import Objective
from polyrl.manifest.spec import JobSpec

OWN_PORTS: Final = (5001, 5002, 5003)
"""Agents, trainer, weights: where our processes listen inside pods (see `cluster.names`)."""

_SECRET: Final = "(_KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$"
"""Ends of the names of variables whose values no file and no log should hold."""

_HAS_SFT: Final = "self.recipe.mode in ['sft', 'sft+rl']"
_HAS_RL: Final = "self.recipe.mode in ['rl', 'sft+rl', 'offline-rl']"
_CHARACTERS: Final = "self.recipe.model.tokenizer.type == 'characters'"
_ALPHABET: Final = "self.recipe.model.tokenizer.alphabet"


def _one_source(role: str) -> Rule:
    storage = f"{role}.storage"
    return Rule(
        f"{role}-storage-kept",
        f"{storage}.claimName",
        message="names a claim, and ephemeral wants none; leave one of the two away",
        holds=lambda s: not (getattr(s, role).storage.ephemeral and getattr(s, role).storage.claim_name is not None),
        cel=f"!(self.{storage}.ephemeral && has(self.{storage}.claimName))",
    )


def _class_used(role: str) -> Rule:
    storage = f"{role}.storage"
    return Rule(
        f"{role}-storage-class-used",
        f"{storage}.storageClassName",
        message="is of a claim that the operator makes; with claimName or ephemeral it makes none",
        holds=lambda s: (
            getattr(s, role).storage.storage_class_name is None
            or not (getattr(s, role).storage.ephemeral or getattr(s, role).storage.claim_name is not None)
        ),
        cel=f"!has(self.{storage}.storageClassName) || !(self.{storage}.ephemeral || has(self.{storage}.claimName))",
    )


def _stage_has(name: str, part: str, runs: Callable[[JobSpec], bool], cel: str) -> tuple[Rule, Rule]:
    """What a stage needs that the mode has."""
    return (
        Rule(
            f"{name}-data",
            f"recipe.data.{name}",
            message="mode {recipe.mode} needs at least one file of rows here",
            holds=lambda s: not runs(s) or bool(getattr(s.recipe.data, name)),
            cel=f"!({cel}) || size(self.recipe.data.{name}) > 0",
        ),
        Rule(
            f"{name}-steps",
            f"recipe.{part}.steps",
            message="mode {recipe.mode} needs at least 1 step",
            holds=lambda s: not runs(s) or getattr(s.recipe, part).steps > 0,
            cel=f"!({cel}) || self.recipe.{part}.steps > 0",
        ),
    )


RECIPE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "model-given",
        "recipe.model",
        message="needs path (a Hugging Face folder) or config (a fresh model)",
        holds=lambda s: s.recipe.model.path is not None or s.recipe.model.config is not None,
        cel="has(self.recipe.model.path) || has(self.recipe.model.config)",
    ),
    Rule(
        "model-once",
        "recipe.model.config",
        message="a model comes from path or from config, not from both",
        holds=lambda s: s.recipe.model.path is None or s.recipe.model.config is None,
        cel="!has(self.recipe.model.path) || !has(self.recipe.model.config)",
    ),
    Rule(
        "lora-without-dropout",
        "recipe.model.lora.dropout",
        message="engines compute without dropout, so that what they drew would be scored by another model;"
        " 0 with mode {recipe.mode}",
        holds=lambda s: not s.recipe.mode.is_online or s.recipe.model.lora is None or s.recipe.model.lora.dropout == 0,
        cel=f"!({IS_ONLINE}) || !has(self.recipe.model.lora) || self.recipe.model.lora.dropout == 0.0",
    ),
    Rule(
        "lora-has-its-model",
        "recipe.model.lora.saveMerged",
        message="adapters alone are of use beside a model that is there: take a model from path, or save it merged",
        holds=lambda s: (
            s.recipe.model.lora is None or s.recipe.model.lora.save_merged or s.recipe.model.path is not None
        ),
        cel="!has(self.recipe.model.lora) || self.recipe.model.lora.saveMerged || has(self.recipe.model.path)",
    ),
    Rule(
        "lora-hands-over",
        "recipe.model.lora.saveMerged",
        message="RL begins from the model that SFT saved, so that mode {recipe.mode} needs it merged",
        holds=lambda s: (
            s.recipe.model.lora is None or s.recipe.model.lora.save_merged or s.recipe.mode is not Mode.SFT_RL
        ),
        cel="!has(self.recipe.model.lora) || self.recipe.model.lora.saveMerged || self.recipe.mode != 'sft+rl'",
    ),
    *_stage_has("sft", "sft", lambda s: s.recipe.mode.has_sft, cel=_HAS_SFT),
    *_stage_has("rl", "algorithm", lambda s: s.recipe.mode.has_rl, cel=_HAS_RL),
    Rule(
        "reward-given",
        "recipe.reward",
        message="mode {recipe.mode} needs a reward function (reward: with function: module:function)",
        holds=lambda s: not s.recipe.mode.is_online or s.recipe.reward is not None,
        cel=f"!({IS_ONLINE}) || has(self.recipe.reward)",
    ),
    Rule(
        "alphabet-given",
        "recipe.model.tokenizer.alphabet",
        message="a tokenizer of type characters needs its alphabet",
        holds=lambda s: s.recipe.model.tokenizer.type != "characters" or s.recipe.model.tokenizer.alphabet != "",
        cel=f"!({_CHARACTERS}) || {_ALPHABET} != ''",
    ),
    Rule(
        "alphabet-distinct",
        "recipe.model.tokenizer.alphabet",
        message="each character may stand in it only once",
        holds=lambda s: len(set(s.recipe.model.tokenizer.alphabet)) == len(s.recipe.model.tokenizer.alphabet),
        cel=f"{_ALPHABET}.split('').all(c, {_ALPHABET}.indexOf(c) == {_ALPHABET}.lastIndexOf(c))",
    ),
    Rule(
        "alphabet-used",
        "recipe.model.tokenizer.alphabet",
        message="only a tokenizer of type characters has an alphabet;"
        " this one is of type {recipe.model.tokenizer.type}",
        holds=lambda s: s.recipe.model.tokenizer.type == "characters" or s.recipe.model.tokenizer.alphabet == "",
        cel=f"{_CHARACTERS} || {_ALPHABET} == ''",
    ),
    Rule(
        "template-kwargs-used",
        "recipe.model.tokenizer.chatTemplateKwargs",
        message="a tokenizer of type characters has no chat template that reads anything",
        holds=lambda s: (
            s.recipe.model.tokenizer.type != "characters" or s.recipe.model.tokenizer.chat_template_kwargs is None
        ),
        cel=f"!({_CHARACTERS}) || !has(self.recipe.model.tokenizer.chatTemplateKwargs)",
    ),
    Rule(
        "tokenizer-found",
        "recipe.model.tokenizer",
        message="a model made from config has no tokenizer of its own:"
        " set tokenizer.path, or type characters with an alphabet",
        holds=lambda s: (
            s.recipe.model.tokenizer.type == "characters"
            or s.recipe.model.config is None
            or s.recipe.model.tokenizer.path is not None
        ),
        cel=f"{_CHARACTERS} || !has(self.recipe.model.config) || has(self.recipe.model.tokenizer.path)",
    ),
    Rule(
        "sampling-explores",
        "recipe.sampling.temperature",
        message="at temperature 0 all samples of a group are equal, and mode {recipe.mode} learns nothing; raise it",
        holds=lambda s: not s.recipe.mode.is_online or s.recipe.sampling.temperature > 0,
        cel=f"!({IS_ONLINE}) || self.recipe.sampling.temperature > 0.0",
    ),
)

ENVIRONMENT_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "env-keeps-secrets",
        "recipe.env",
        message="holds the value of what is named like a secret (..._KEY, TOKEN, SECRET, PASSWORD); leave the value"
        " away: it is taken from your environment, on a cluster from recipe.envSecret",
        holds=lambda s: not any(e.value is not None and re.search(_SECRET, e.name) for e in s.recipe.env),
        cel=f"self.recipe.env.all(e, !has(e.value) || !e.name.matches('{_SECRET}'))",
    ),
    Rule(
        "env-leaves-ours",
        "recipe.env",
        message="names a variable that begins with POLYRL_; those are PolyRL's own",
        holds=lambda s: not any(e.name.startswith("POLYRL_") for e in s.recipe.env),
        cel="!self.recipe.env.exists(e, e.name.startsWith('POLYRL_'))",
    ),
)

FLEET_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "engine-model",
        "rollout.engine.type",
        message="SGLang loads a folder (recipe.model.path); a model made from config needs type embedded",
        holds=lambda s: (
            not s.recipe.mode.is_online or not s.rollout.engine.type.is_server or s.recipe.model.config is None
        ),
        cel=f"!({IS_ONLINE}) || self.rollout.engine.type == 'embedded' || !has(self.recipe.model.config)",
    ),
    Rule(
        "switch-in-flight",
        "rollout.engine.weightSwitch",
        message="is keep, but with recipe.algorithm.maxStaleness 0 nothing runs while weights are loaded; leave it"
        " away, or generate ahead of training",
        holds=lambda s: (
            s.rollout.engine.weight_switch is WeightSwitch.RECOMPUTE
            or (s.recipe.mode.is_online and s.recipe.algorithm is not None and s.recipe.algorithm.max_staleness > 0)
        ),
        cel="self.rollout.engine.weightSwitch == 'recompute' || ("
        f"({IS_ONLINE}) && has(self.recipe.algorithm) && self.recipe.algorithm.maxStaleness > 0)",
    ),
    Rule(
        "response-fits",
        "recipe.sampling.maxNewTokens",
        message="{recipe.sampling.maxNewTokens} leaves no room for a prompt in rollout.engine.maxContext"
        " ({rollout.engine.maxContext})",
        holds=lambda s: not s.recipe.mode.is_online or s.recipe.sampling.max_new_tokens < s.rollout.engine.max_context,
        cel=f"!({IS_ONLINE}) || self.recipe.sampling.maxNewTokens < self.rollout.engine.maxContext",
    ),
    Rule(
        "cache-fits",
        "rollout.engine.kvTokens",
        message="{rollout.engine.kvTokens} cannot hold one sequence of maxContext ({rollout.engine.maxContext}) tokens",
        holds=lambda s: s.rollout.engine.type.is_server or s.rollout.engine.kv_tokens >= s.rollout.engine.max_context,
        cel="self.rollout.engine.type != 'embedded' || self.rollout.engine.kvTokens >= self.rollout.engine.maxContext",
    ),
    Rule(
        "replicas-ordered",
        "rollout.maxReplicas",
        message="{rollout.maxReplicas} is less than minReplicas ({rollout.minReplicas})",
        holds=lambda s: s.rollout.min_replicas <= s.rollout.max_replicas,
        cel="self.rollout.minReplicas <= self.rollout.maxReplicas",
    ),
    Rule(
        "leases-ordered",
        "rollout.lostAfterSeconds",
        message="{rollout.lostAfterSeconds} is less than leaseSeconds ({rollout.leaseSeconds})",
        holds=lambda s: s.rollout.lease_seconds <= s.rollout.lost_after_seconds,
        cel="self.rollout.leaseSeconds <= self.rollout.lostAfterSeconds",
    ),
    Rule(
        "someone-generates",
        "rollout.maxReplicas",
        message="0 rollouts and no trainer.reservedEngine: nothing would generate",
        holds=lambda s: not s.recipe.mode.is_online or s.trainer.reserved_engine or s.rollout.max_replicas > 0,
        cel=f"!({IS_ONLINE}) || self.trainer.reservedEngine || self.rollout.maxReplicas > 0",
    ),
    Rule(
        "base-fits",
        "rollout.capacity.baseOnDemand",
        message="{rollout.capacity.baseOnDemand} is more than maxReplicas ({rollout.maxReplicas})",
        holds=lambda s: s.rollout.capacity.base_on_demand <= s.rollout.max_replicas,
        cel="self.rollout.capacity.baseOnDemand <= self.rollout.maxReplicas",
    ),
    Rule(
        "base-used",
        "rollout.capacity.baseOnDemand",
        message="means nothing with policy OnDemand, where every rollout is on-demand",
        holds=lambda s: (
            s.rollout.capacity.policy is not CapacityPolicy.ON_DEMAND or s.rollout.capacity.base_on_demand == 0
        ),
        cel="self.rollout.capacity.policy != 'OnDemand' || self.rollout.capacity.baseOnDemand == 0",
    ),
    Rule(
        "fallback-used",
        "rollout.capacity.fallback.enabled",
        message="needs policy SpotPreferred; policy is {rollout.capacity.policy}",
        holds=lambda s: (
            not s.rollout.capacity.fallback.enabled or s.rollout.capacity.policy is CapacityPolicy.SPOT_PREFERRED
        ),
        cel="!self.rollout.capacity.fallback.enabled || self.rollout.capacity.policy == 'SpotPreferred'",
    ),
    Rule(
        "slices-of-all-processes",
        "trainer.contextParallel",
        message="{trainer.contextParallel} does not divide the processes that learn, replicas ({trainer.replicas})"
        " times processesPerPod ({trainer.processesPerPod})",
        holds=lambda s: s.trainer.learner_processes % s.trainer.context_parallel == 0,
        cel="!has(self.trainer.processesPerPod)"
        " || self.trainer.replicas * self.trainer.processesPerPod % self.trainer.contextParallel == 0",
    ),
    Rule(
        "copies-divide-processes",
        "trainer.fsdp.dpReplicate",
        message="{trainer.fsdp.dpReplicate} copies of the model do not divide the processes that learn, which are"
        " replicas ({trainer.replicas}) times processesPerPod ({trainer.processesPerPod})",
        holds=lambda s: s.trainer.learner_processes % s.trainer.fsdp.dp_replicate == 0,
        cel="!has(self.trainer.processesPerPod)"
        " || (self.trainer.replicas * self.trainer.processesPerPod) % self.trainer.fsdp.dpReplicate == 0",
    ),
    Rule(
        "storage-of-all-pods",
        "trainer.storage.accessMode",
        message="several trainer pods write one checkpoint; set ReadWriteMany, and a class or claim that has it",
        holds=lambda s: s.trainer.replicas == 1 or s.trainer.storage.access_mode == "ReadWriteMany",
        cel="self.trainer.replicas == 1 || self.trainer.storage.accessMode == 'ReadWriteMany'",
    ),
    Rule(
        "checkpoints-of-all-pods",
        "trainer.storage.ephemeral",
        message="several trainer pods go on together from one checkpoint, which must outlive them; leave it out",
        holds=lambda s: s.trainer.replicas == 1 or not s.trainer.storage.ephemeral,
        cel="self.trainer.replicas == 1 || !self.trainer.storage.ephemeral",
    ),
    Rule(
        "isolated-pods-that-learn",
        "networkPolicy.mode",
        message="several trainer pods exchange gradients in the clear, which others must not reach; set Isolated",
        holds=lambda s: s.trainer.replicas == 1 or s.network_policy.mode == "Isolated",
        cel="self.trainer.replicas == 1 || self.networkPolicy.mode == 'Isolated'",
    ),
    Rule(
        "budget-given",
        "scaling.budgetPerHour",
        message="objective ThroughputUnderBudget needs a budget",
        holds=lambda s: (
            s.scaling.objective is not Objective.THROUGHPUT_UNDER_BUDGET or s.scaling.budget_per_hour is not None
        ),
        cel="self.scaling.objective != 'ThroughputUnderBudget' || has(self.scaling.budgetPerHour)",
    ),
    Rule(
        "budget-used",
        "scaling.budgetPerHour",
        message="is only kept by objective ThroughputUnderBudget; objective is {scaling.objective}",
        holds=lambda s: s.scaling.objective is Objective.THROUGHPUT_UNDER_BUDGET or s.scaling.budget_per_hour is None,
        cel="self.scaling.objective == 'ThroughputUnderBudget' || !has(self.scaling.budgetPerHour)",
    ),
    Rule(
        "prices-given",
        "scaling.objective",
        message="{scaling.objective} weighs money: it needs pricing.spotPerHour and pricing.onDemandPerHour",
        holds=lambda s: (
            s.scaling.objective is Objective.THROUGHPUT
            or (s.pricing.spot_per_hour is not None and s.pricing.on_demand_per_hour is not None)
        ),
        cel="self.scaling.objective == 'Throughput'"
        " || (has(self.pricing.spotPerHour) && has(self.pricing.onDemandPerHour))",
    ),
    Rule(
        "failure-rule-matches",
        "failurePolicy.rules",
        message="each rule has exactly one of onExitCodes and onPodConditions",
        holds=lambda s: all((r.on_exit_codes is None) != (r.on_pod_conditions is None) for r in s.failure_policy.rules),
        cel="self.failurePolicy.rules.all(r, has(r.onExitCodes) != has(r.onPodConditions))",
    ),
    Rule(
        "faults-happen",
        "faultInjection",
        message="a fault is only injected in modes rl and sft+rl, at an atStep of at most algorithm.steps"
        " ({recipe.algorithm.steps}), on a rollout below maxReplicas ({rollout.maxReplicas})",
        holds=lambda s: all(
            s.recipe.mode.is_online and f.at_step <= s.recipe.algorithm.steps and f.rollout < s.rollout.max_replicas
            for f in s.fault_injection
        ),
        cel=f"self.faultInjection.all(f, {IS_ONLINE}"
        " && f.atStep <= self.recipe.algorithm.steps && f.rollout < self.rollout.maxReplicas)",
    ),
    _one_source("trainer"),
    _one_source("manager"),
    _class_used("trainer"),
    _class_used("manager"),
    Rule(
        "port-free",
        "manager.port",
        message="{manager.port} is taken: 5001 is for agents, 5002 for the trainer, 5003 for weights",
        holds=lambda s: s.manager.port not in OWN_PORTS,
        cel="!(self.manager.port in [5001, 5002, 5003])",
    ),
    Rule(
        "code-from-one-source",
        "recipe.code",
        message="comes from configMap or from volumeClaim, not from both",
        holds=lambda s: s.recipe.code.config_map is None or s.recipe.code.volume_claim is None,
        cel="!(has(self.recipe.code.configMap) && has(self.recipe.code.volumeClaim))",
    ),
)

RULES: Final = (
    RECIPE_RULES
    + ALGORITHM_RULES
    + DATA_RULES
    + PREFERENCE_RULES
    + EVALUATION_RULES
    + ENVIRONMENT_RULES
    + FLEET_RULES
    + ENGINE_RULES
)


def broken_rules(spec: JobSpec) -> Iterator[tuple[Rule, str]]:
    """Each rule that `spec` breaks, with its sentence, in the order of RULES."""
    return ((rule, rule.sentence(spec)) for rule in RULES if not rule.holds(spec))
