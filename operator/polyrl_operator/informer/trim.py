"""What is kept of an object that the API server sends: what decisions read, and nothing else.

A pod of 6 kB becomes 1 kB of JSON text, which also tells whether an event changed anything: heartbeats do not.
Refuses to hold: what the fields mean (see `polyrl.cluster.observation.job`). Read next: `cache`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from polyrl.cluster.actions import Object
from polyrl_operator.api.kinds import CLAIM, JOB, NODE, POD, TRAINER, ResourceKind

OUR_ANNOTATIONS: Final = ("polyrl.dev/", "karpenter.sh/")
"""Prefixes of the annotations that are read; others may be 256 KiB."""

_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "ownerReferences",
)
_POD_SPEC: Final = ("nodeName", "restartPolicy")
_POD_STATUS: Final = ("phase", "reason", "message", "podIP", "startTime")
_CONDITION: Final = ("type", "status", "reason", "message", "lastTransitionTime")
_CONTAINER: Final = ("name", "ready", "started", "restartCount", "state", "lastState")
_CONTAINER_LISTS: Final = ("initContainerStatuses", "containerStatuses")
_TRAINER_SPEC: Final = ("suspend", "parallelism", "completions", "backoffLimit")
_NODE_SPEC: Final = ("taints", "unschedulable", "providerID")
_UNCOUNTED: Final = "uncountedTerminatedPods"


def trimmed(kind: ResourceKind, raw: Object) -> Object:
    """The part of `raw` that is kept. `resourceVersion` is not in it: by itself it changes nothing."""
    kept: Object = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": _metadata(raw["metadata"])}
    if kind is JOB:
        return kept | _some(raw, ("spec", "status"))
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    if kind is POD:
        kept["spec"] = _some(spec, _POD_SPEC)
        kept["status"] = _pod_status(status)
    elif kind is TRAINER:
        template = (spec.get("template") or {}).get("metadata") or {}
        kept["spec"] = _some(spec, _TRAINER_SPEC) | {"template": {"metadata": _some(template, ("labels",))}}
        kept["status"] = {key: value for key, value in status.items() if key != _UNCOUNTED}
    elif kind is NODE:
        kept["spec"] = _some(spec, _NODE_SPEC)
        kept["status"] = {"conditions": _conditions(status)}
    elif kind is CLAIM:
        kept["status"] = _some(status, ("nodeName", "providerID")) | {"conditions": _conditions(status)}
    return kept


def _metadata(metadata: Mapping[str, Any]) -> Object:
    ours = {key: value for key, value in (metadata.get("annotations") or {}).items() if key.startswith(OUR_ANNOTATIONS)}
    return _some(metadata, _METADATA) | ({"annotations": ours} if ours else {})


def _pod_status(status: Mapping[str, Any]) -> Object:
    kept = _some(status, _POD_STATUS) | {"conditions": _conditions(status)}
    for containers in _CONTAINER_LISTS:
        if status.get(containers):
            kept[containers] = [_some(container, _CONTAINER) for container in status[containers]]
    return kept


def _conditions(status: Mapping[str, Any]) -> list[Object]:
    return [_some(condition, _CONDITION) for condition in status.get("conditions") or ()]


def _some(values: Mapping[str, Any], keys: Iterable[str]) -> Object:
    return {key: values[key] for key in keys if key in values}
