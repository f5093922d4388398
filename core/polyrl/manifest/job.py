"""`PolyRLJob`: the whole manifest. Read the same from a file on a laptop and from the API server on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from polyrl.errors import InvalidData
from polyrl.manifest.base import ManifestModel, Name
from polyrl.manifest.rollout import RolloutSpec as RolloutSpec
from polyrl.manifest.rules.between_fields import broken_rules
from polyrl.manifest.spec import JobSpec as JobSpec, TrainerSpec as TrainerSpec
from polyrl.manifest.status import JobStatus

API_VERSION: Final = "polyrl.dev/v1alpha1"
KIND: Final = "PolyRLJob"
RULE_ERROR: Final = "rule"
"""Error type under which a broken rule appears in a ValidationError; the message is the rule's whole sentence."""


class Metadata(ManifestModel):
    """The part of Kubernetes' ObjectMeta that we read; the rest is kept and ignored."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=46, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Lower case letters, digits and dashes; at most 46 characters, because pods and services add suffixes within a DNS
    label's 63."""
    namespace: Name | None = None
    """Namespace of the object; a local run has none."""


class PolyRLJob(ManifestModel):
    """One training run."""

    api_version: Literal["polyrl.dev/v1alpha1"]
    """Group and version."""
    kind: Literal["PolyRLJob"]
    """Kind."""
    metadata: Metadata
    """Name and namespace."""
    spec: JobSpec
    """What the user asks for."""
    status: JobStatus | None = None
    """Written by the operator; ignored when read from a file."""

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        faults = [
            InitErrorDetails(
                type=PydanticCustomError(RULE_ERROR, "{sentence}", {"sentence": sentence}),
                loc=("spec", *rule.field),
                input=None,
            )
            for rule, sentence in broken_rules(self.spec)
        ]
        if faults:
            raise ValidationError.from_exception_data(KIND, faults)
        return self


def remove_field(data: Any, path: Sequence[int | str]) -> None:
    """Takes the field out of a manifest's plain values; one that is not there is fine."""
    try:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]
    except (KeyError, IndexError, TypeError):
        return


def read_job(path: Path) -> PolyRLJob:
    """The job that a worker is given as JSON. Raises InvalidData naming the file and its first wrong field."""
    try:
        return PolyRLJob.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidData(f"{path}: cannot read the job: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidData(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
