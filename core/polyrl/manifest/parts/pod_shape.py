"""The parts of a pod template that the operator merges with its own pod, and their types.

All else of a template is handed on unseen, for the API server to judge. These parts are read before it does: a number
where a list belongs would otherwise be found in the middle of a reconcile, again and again.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _EnvironmentEntry(msgspec.Struct):
    name: str


class _MountEntry(msgspec.Struct, rename="camel"):
    mount_path: str


class _ResourceShares(msgspec.Struct):
    requests: dict[str, int | float | str] = {}
    limits: dict[str, int | float | str] = {}


class _ContainerParts(msgspec.Struct, rename="camel"):
    name: str
    env: list[_EnvironmentEntry] = []
    volume_mounts: list[_MountEntry] = []
    resources: _ResourceShares = msgspec.field(default_factory=_ResourceShares)
    security_context: dict[str, Any] = {}


class _VolumeEntry(msgspec.Struct):
    name: str


class _TolerationEntry(msgspec.Struct):
    key: str = ""
    operator: str = ""


class _SelectorTerm(msgspec.Struct, rename="camel"):
    match_expressions: list[dict[str, Any]] = []


class _NodeSelector(msgspec.Struct, rename="camel"):
    node_selector_terms: list[_SelectorTerm] = []


class _NodeAffinity(msgspec.Struct, rename="camel"):
    required_during_scheduling_ignored_during_execution: _NodeSelector | None = None


class _AffinityParts(msgspec.Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _PodParts(msgspec.Struct, rename="camel"):
    containers: list[_ContainerParts]
    init_containers: list[_ContainerParts] = []
    volumes: list[_VolumeEntry] = []
    tolerations: list[_TolerationEntry] = []
    security_context: dict[str, Any] = {}
    affinity: _AffinityParts = msgspec.field(default_factory=_AffinityParts)


class _TemplateMetadata(msgspec.Struct):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Template(msgspec.Struct):
    spec: _PodParts
    metadata: _TemplateMetadata = msgspec.field(default_factory=_TemplateMetadata)


def without_nulls(value: Any) -> Any:
    """The same without fields that are null, at any depth: to the API server such a field is absent, and a rule that
    asks whether it is there must not be misled."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def check_pod_shape(template: dict[str, Any]) -> None:
    """Raises ValueError, which names the part of a PodTemplateSpec that has another type than the merge takes."""
    try:
        msgspec.convert(template, _Template)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise ValueError(f"{place.strip('.`') or 'the template'}: {what[0].lower()}{what[1:]}") from None
