"""The manifest's models as the API server wants them: one CustomResourceDefinition with a structural schema.

pydantic writes JSON Schema 2020-12; a CRD takes a narrower dialect: everything in place of references, one type per
node, `exclusiveMinimum` as a boolean, no `additionalProperties: false` (the server prunes what it does not know),
object defaults as `{}` so that each field's own default fills them. The server prunes nulls: nothing is nullable.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, Final

from polyrl.manifest.base import CLUSTER_ONLY_KEY, INT32_MAX
from polyrl.manifest.job import API_VERSION, KIND, PolyRLJob
from polyrl.manifest.rules.between_fields import RULES
from polyrl.manifest.rules.rule import Rule, TransitionRule
from polyrl.manifest.rules.transitions import TRANSITIONS

Schema = dict[str, Any]

OPEN: Final = "x-kubernetes-preserve-unknown-fields"
"""Marks objects whose further fields are kept."""

LARGEST_EXACT_BOUND: Final = 2**53
"""The server holds bounds as doubles and refuses those of int64's ends, which round up; the format says them anyway."""

_LIST_MAPS: Final = {"conditions": "type", "pools": "name"}
"""Lists of the status that are merged by a key, and the key."""

_NOT_CARRIED: Final = ("title", "$ref", "anyOf", "const", "prefixItems", "additionalProperties", "default")

_PRINTED: Final = (
    ("State", "string", ".status.state", 0),
    ("Trainer", "integer", ".status.trainer.ready", 0),
    ("Rollout", "integer", ".status.rollout.registeredReplicas", 0),
    ("Desired", "integer", ".status.rollout.desiredReplicas", 0),
    ("Max", "integer", ".spec.rollout.maxReplicas", 0),
    ("Spot", "integer", ".status.rollout.spotReplicas", 0),
    ("Preempted", "integer", ".status.rollout.preemptions", 0),
    ("Step", "integer", ".status.manager.step", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Gap-ms", "integer", ".status.scaling.gapMillis", 1),
    ("Reason", "string", '.status.conditions[?(@.type=="CapacityLimited")].reason', 1),
    ("Manager", "string", ".status.manager.endpoint", 1),
)
"""Columns of `kubectl get prl`: name, type, path, priority (1: only with -o wide)."""


@cache
def manifest_schema() -> Schema:
    """The whole manifest as a structural schema; fields that only a cluster uses carry CLUSTER_ONLY_KEY."""
    schema = PolyRLJob.model_json_schema(by_alias=True)
    return _structural(schema, schema["$defs"])


def custom_resource_definition() -> Schema:
    """The CRD as a plain value, ready to be written as YAML or sent to an API server."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "polyrljobs.polyrl.dev"},
        "spec": {
            "group": API_VERSION.partition("/")[0],
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": "polyrljobs",
                "singular": "polyrljob",
                "shortNames": ["prl"],
                # Not in `all`: tools that prune by `all` would delete running jobs.
                "categories": ["polyrl"],
            },
            "versions": [_version()],
        },
    }


def _version() -> Schema:
    return {
        "name": API_VERSION.partition("/")[2],
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(*printed) for printed in _PRINTED],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.rollout.replicas",
                "statusReplicasPath": ".status.rollout.replicas",
                "labelSelectorPath": ".status.rollout.selector",
            },
        },
        "schema": {"openAPIV3Schema": _served_schema()},
    }


def _column(name: str, kind: str, path: str, priority: int) -> Schema:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})


def _served_schema() -> Schema:
    served = _without_marks(deepcopy(manifest_schema()))
    properties = served["properties"]
    # Of metadata a CRD may constrain the name only; apiVersion and kind are the server's own business.
    properties["metadata"] = {"type": "object", "properties": {"name": properties["metadata"]["properties"]["name"]}}
    properties["apiVersion"] = properties["kind"] = {"type": "string"}
    properties["spec"]["x-kubernetes-validations"] = [_validation(rule) for rule in RULES] + [
        _validation(transition) for transition in TRANSITIONS
    ]
    served["required"] = ["spec"]
    return served


def _validation(rule: Rule | TransitionRule) -> Schema:
    checked = {"rule": rule.cel, "message": rule.static_message(), "fieldPath": f".{rule.path}"}
    if isinstance(rule, Rule) and "{" in rule.message:
        checked["messageExpression"] = rule.message_expression()
    return checked


def _without_marks(node: Schema) -> Schema:
    node.pop(CLUSTER_ONLY_KEY, None)
    for child in (*node.get("properties", {}).values(), *([node["items"]] if "items" in node else [])):
        _without_marks(child)
    return node


def _structural(node: Schema, definitions: Schema) -> Schema:
    node = _resolved(node, definitions)
    made = {key: value for key, value in node.items() if key not in _NOT_CARRIED and key != "$defs"}
    if "description" in made:
        made["description"] = " ".join(made["description"].split())
    if "const" in node:
        made["enum"] = [node["const"]]
    if node.get("additionalProperties") is True:
        made[OPEN] = True
    _translate_bounds(made)
    if node.get("default") is not None:
        made["default"] = {} if isinstance(node["default"], dict) else node["default"]
    items = node["prefixItems"][0] if "prefixItems" in node else node.get("items")
    if items is not None:
        made["items"] = _structural(items, definitions)
    if "properties" in node:
        made["properties"] = {name: _field(name, child, definitions) for name, child in node["properties"].items()}
    return made


def _field(name: str, node: Schema, definitions: Schema) -> Schema:
    made = _structural(node, definitions)
    if name in _LIST_MAPS and made["type"] == "array":
        made |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [_LIST_MAPS[name]]}
    return made


def _resolved(node: Schema, definitions: Schema) -> Schema:
    """The node with its reference and its `or null` put in place; what stands beside them wins."""
    beside = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if "$ref" in node:
        return _resolved(definitions[node["$ref"].rpartition("/")[2]], definitions) | beside
    if "anyOf" in node:
        (given,) = (choice for choice in node["anyOf"] if choice != {"type": "null"})
        return _resolved(given, definitions) | beside
    return node


def _translate_bounds(node: Schema) -> None:
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            node[inclusive] = node[exclusive]
            node[exclusive] = True
    if node.get("type") == "integer":
        node["format"] = "int32" if node.get("maximum", INT32_MAX + 1) <= INT32_MAX else "int64"
        for bound in ("minimum", "maximum"):
            if abs(node.get(bound, 0)) > LARGEST_EXACT_BOUND:
                del node[bound]
