"""A user's pod template and our own pod as one: the first container is ours with their additions, the rest is kept.

ours always       command, name of the first container, restartPolicy, grace, our labels
ours unless named image, resource by resource, environment by variable, mounts by path, securityContext by field
ours, image, variables and mounts as in the first: what runs before it
both              volumes, tolerations, node requirements (theirs and ours must hold)
theirs            further containers, as sidecars of Kubernetes: beside a plain one a trainer that is done would run on
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from polyrl.cluster.resources.placement import Placement, Requirement
from polyrl.manifest.cluster import PodTemplate

Fields: TypeAlias = dict[str, Any]
"""Part of a Kubernetes object."""

RESTRICTED: Fields = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
"""securityContext of each of our containers; with the pod's it satisfies Pod Security `restricted`."""


def template_fields(template: PodTemplate | None) -> tuple[Fields, Fields]:
    """metadata and spec of a user's template as they wrote them; empty when there is none."""
    if template is None:
        return {}, {}
    plain = template.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return plain.get("metadata", {}), plain["spec"]


def container_resources(template: PodTemplate | None) -> Fields:
    """What a user's template names for our container, the first one."""
    _, spec = template_fields(template)
    ours = spec.get("containers", [])[:1]
    resources: Fields = ours[0].get("resources", {}) if ours else {}
    return resources


def merged_metadata(theirs: Fields, labels: Fields, annotations: Fields) -> Fields:
    """labels and annotations of the pod: our labels win, because they select; their annotations win."""
    return {
        "labels": {**theirs.get("labels", {}), **labels},
        "annotations": {**annotations, **theirs.get("annotations", {})},
    }


def merged_spec(theirs: Fields, ours: Fields, placement: Placement) -> Fields:
    """The pod's spec. `ours` holds one container, volumes, and what is forced."""
    beside = [{**_restricted(one), "restartPolicy": "Always"} for one in theirs.get("containers", [])[1:]]
    spec = {**ours["defaults"], **theirs, **ours["forced"]}
    spec["securityContext"] = {**ours["securityContext"], **theirs.get("securityContext", {})}
    spec["containers"] = [_first(theirs, ours["container"])]
    spec["volumes"] = [*theirs.get("volumes", []), *ours["volumes"]]
    if before := [*map(_restricted, theirs.get("initContainers", [])), *beside, *_of_ours_before(theirs, ours)]:
        spec["initContainers"] = before
    spec["tolerations"] = [*theirs.get("tolerations", []), *placement.tolerations]
    if placement.required:
        spec["affinity"] = _affinity(theirs.get("affinity", {}), placement.required)
    return spec


def merged_container(theirs: Fields, ours: Fields) -> Fields:
    """One container of ours with a user's additions."""
    merged = {**theirs, **{key: ours[key] for key in ("name", "command")}}
    merged["image"] = theirs.get("image", ours["image"])
    merged["env"] = _by_key("name", ours.get("env", []), theirs.get("env", []))
    merged["volumeMounts"] = _by_key("mountPath", ours.get("volumeMounts", []), theirs.get("volumeMounts", []))
    merged["resources"] = merged_resources(theirs.get("resources", {}), ours.get("resources", {}))
    merged["securityContext"] = {**ours["securityContext"], **theirs.get("securityContext", {})}
    return {**merged, **{key: value for key, value in ours.items() if key not in merged}}


def merged_resources(theirs: Fields, ours: Fields) -> Fields:
    """Where a user names a resource, our request and limit of it both go: ours might exceed theirs."""
    named = {name for part in ("requests", "limits") for name in theirs.get(part, {})}
    merged = dict(theirs)
    for part in ("requests", "limits"):
        kept = {name: amount for name, amount in ours.get(part, {}).items() if name not in named}
        if kept or part in theirs:
            merged[part] = {**kept, **theirs.get(part, {})}
    return merged


def _first(theirs: Fields, ours: Fields) -> Fields:
    containers = theirs.get("containers", [])
    return merged_container(containers[0] if containers else {}, ours)


def _of_ours_before(theirs: Fields, ours: Fields) -> list[Fields]:
    """Init containers of ours, with what the user gave the first container that is no device of its own."""
    first: Fields = next(iter(theirs.get("containers", [])), {})
    given: Fields = {key: first[key] for key in ("image", "imagePullPolicy", "env", "volumeMounts") if key in first}
    return [merged_container(given, one) for one in ours.get("initContainers", ())]


def _restricted(container: Fields) -> Fields:
    """A user's own container: may write to its root, and is else held to what ours are, unless it says otherwise."""
    ours = {key: value for key, value in RESTRICTED.items() if key != "readOnlyRootFilesystem"}
    return {**container, "securityContext": {**ours, **container.get("securityContext", {})}}


def _by_key(key: str, ours: Iterable[Fields], theirs: Iterable[Fields]) -> list[Fields]:
    return list({one[key]: one for one in (*ours, *theirs)}.values())


def _affinity(theirs: Fields, required: tuple[Requirement, ...]) -> Fields:
    """Terms are alternatives, so ours goes into each."""
    node = theirs.get("nodeAffinity", {})
    hard = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = node.get(hard, {}).get("nodeSelectorTerms") or [{}]
    joined = [{**term, "matchExpressions": [*term.get("matchExpressions", []), *required]} for term in terms]
    return {**theirs, "nodeAffinity": {**node, hard: {"nodeSelectorTerms": joined}}}
