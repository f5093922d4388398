"""Pod templates that ask for more GPUs than their process uses, or for fewer: notes, for there may be reasons.

The API server cannot check it: containers are kept there unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from polyrl.manifest.cluster import PodTemplate
from polyrl.manifest.engine_args import gpus_per_engine
from polyrl.manifest.job import JobSpec

GPU_RESOURCE: Final = "nvidia.com/gpu"
RESERVED: Final = "reserved"
"""The initContainer that adds to the reserved engine's sidecar."""


def template_notes(spec: JobSpec) -> list[str]:
    """One sentence each."""
    trainer, rollout = _first(spec.trainer.template), _first(spec.rollout.template)
    each = gpus_per_engine(spec.rollout.engine)
    notes = []
    if (number := _gpus(trainer)) > 1:
        notes.append(f"spec.trainer.template asks for {number} {GPU_RESOURCE}, and the learner uses 1")
    if (number := _gpus(rollout)) and number != each:
        notes.append(f"spec.rollout.template asks for {number} {GPU_RESOURCE}, and an engine uses {each}")
    if _gpus(trainer) and each and spec.trainer.reserved_engine and not _shares(spec.trainer.template):
        notes.append(
            "spec.trainer.template: the reserved engine has no GPU, for a device plugin lends one to one container;"
            " give initContainers one named reserved with a GPU or a claim, or set trainer.reservedEngine: false"
        )
    return notes


def _first(template: PodTemplate | None) -> Mapping[str, Any]:
    return {} if template is None else template.spec.containers[0].model_extra or {}


def _gpus(container: Mapping[str, Any]) -> int:
    """0 where it asks for none, or for devices in another way."""
    limits = _mapping(_mapping(container.get("resources")).get("limits"))
    number = str(limits.get(GPU_RESOURCE, 0))
    return int(number) if number.isdecimal() else 0


def _shares(template: PodTemplate | None) -> bool:
    given = None if template is None else (template.spec.model_extra or {}).get("initContainers")
    sidecars: Iterable[Any] = given if isinstance(given, list) else ()
    found = [one for one in map(_mapping, sidecars) if one.get("name") == RESERVED]
    return any(_gpus(one) or _mapping(one.get("resources")).get("claims") for one in found)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
