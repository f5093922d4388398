"""What only a cluster has: pod templates, the manager's address, networks, budgets, failure rules.

There is no copy of Kubernetes' PodSpec: it would age with every release. Templates declare the containers and keep the
rest unseen, and the operator's dry run gives the API server's own verdict on them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from polyrl.manifest.base import BY_VALUE, ManifestModel, Name, PathText
from polyrl.manifest.parts.pod_shape import check_pod_shape, without_nulls

GPU_RESOURCE: Final = "nvidia.com/gpu"


class Container(ManifestModel):
    """One container; further fields are kept and handed on unseen."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the container; the first one is renamed after its role: manager, trainer or rollout."""
    image: PathText | None = None
    """Image reference; default: the operator's own image."""


class PodSpec(ManifestModel):
    """The pod; further fields are kept and handed on unseen."""

    model_config = ConfigDict(extra="allow")

    containers: list[Container] = Field(min_length=1, max_length=32)
    """The first one is ours: the operator sets its command, and adds to the rest. The others are sidecars."""


class PodTemplate(ManifestModel):
    """A Kubernetes PodTemplateSpec."""

    metadata: dict[str, Any] = Field(default={})
    """Labels and annotations of the pod."""
    spec: PodSpec
    """The pod. The operator adds what it needs and what `capacity` asks for; of environment, mounts, resources,
    tolerations and securityContext both are kept, and where they clash, what is written here wins. Its own are command,
    restartPolicy, grace period and selecting labels."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return without_nulls(given)

    @model_validator(mode="after")
    def _has_its_shape(self) -> Self:
        check_pod_shape(self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True))
        return self

    @property
    def gpus(self) -> int:
        """GPUs that it asks for, 0 where none."""
        return gpus_asked_for({"spec": self.spec.model_dump(exclude_unset=True)})


def gpus_asked_for(template: Any) -> int:
    """`nvidia.com/gpu` of the first container, in a template as it is written, which may be wrong; 0 where it asks for
    none, or for devices in another way."""
    found = template
    for key in ("spec", "containers", 0, "resources", "limits", GPU_RESOURCE):
        match found:
            case dict():
                found = found.get(key)
            case [first, *_] if key == 0:
                found = first
            case _:
                return 0
    number = f"{found:g}" if isinstance(found, float) else str(found)
    return int(number) if number.isdecimal() else 0


Quantity = Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$")]
"""An amount of bytes as Kubernetes writes it, such as 10Gi."""


class StorageSpec(ManifestModel):
    """Where something outlives its pod: a claim that the operator makes, one that is there, or nothing."""

    storage_class_name: Name | None = None
    """Class of the claim that is made; default: the cluster's own."""
    claim_name: Name | None = None
    """A PersistentVolumeClaim in the job's namespace that is used instead; it stays when the job goes. Each job has a
    folder of its own there, named by the job's uid."""
    ephemeral: bool = False
    """True keeps it in the pod, and loses it with the pod; for trials only."""


class JournalStorage(StorageSpec):
    """Where the manager's journal lies."""

    size: Quantity = "1Gi"
    """Size of the claim that is made, and bound of what is ephemeral; a journal holds live samples only,
    some ten bytes per token."""


class TrainerStorage(StorageSpec):
    """Where checkpoints and metrics lie."""

    size: Quantity = "10Gi"
    """Size of the claim that is made, and bound of what is ephemeral; holds `checkpoint.keep` checkpoints, the last of
    each stage and the one that is being written, each of 12 bytes a parameter."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    """Access mode of the claim that is made, or what the named one has. Several pods (`trainer.replicas`) need
    ReadWriteMany: each writes its part of a checkpoint."""


class ManagerSpec(ManifestModel):
    """Where the manager is reached."""

    port: Annotated[int, Field(ge=1, le=65535)] = 5000
    """Port of the manager's HTTP API on a cluster; a local run takes a free one. Immutable."""
    template: PodTemplate | None = None
    """The manager's pod; default: the operator's own image on on-demand capacity."""
    storage: JournalStorage = JournalStorage()
    """Where its journal lies, with every sample between prompt and gradient. Immutable."""


class Egress(ManifestModel):
    """One destination beyond the job's own pods and DNS."""

    cidr: Annotated[str, Field(max_length=43, pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")]
    """Addresses, as `10.0.0.0/8`."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """TCP port; default: all."""


class NetworkPolicySpec(ManifestModel):
    """Who may talk to this job's pods; enforced by the cluster's network plugin, where it has one that does."""

    mode: Literal["None", "Isolated"] = "Isolated"
    """Isolated lets this job's pods reach each other, the cluster's DNS and what the other fields name, and lets in the
    operator alone; None makes no NetworkPolicy."""
    public_https: Literal["Auto", "Always", "Never"] = "Auto"
    """Isolated trainers may reach public addresses on TCP 443. Auto: when `model.path` has the form OWNER/NAME, when
    it or a file of rows is a URI that is fetched, or when `logging.wandb` is set and not offline. Always: for a reward
    that asks a public judge, say. Rollouts never may."""
    extra_egress: list[Egress] = Field(default=[], max_length=32)
    """Destinations that Isolated also allows to trainer and rollouts, such as an object store."""


class PodDisruptionBudgetSpec(ManifestModel):
    """What voluntary evictions must spare. Spot rollouts have none: a blocked eviction wastes the notice."""

    trainer: Literal["Auto", "None"] = "Auto"
    """Auto protects every trainer pod."""


class FailureAction(StrEnum):
    """What a matching end of a trainer pod does; words as in Job's podFailurePolicy."""

    IGNORE = "Ignore"
    """The pod is replaced and the restart is not counted."""
    COUNT = "Count"
    """The restart counts towards backoffLimit."""
    FAIL_JOB = "FailJob"
    """The job fails at once."""


class OnExitCodes(ManifestModel):
    """Matches a container's exit status."""

    operator: Literal["In", "NotIn"]
    """Whether `values` lists the statuses that match or those that don't."""
    values: list[Annotated[int, Field(ge=0, le=255)]] = Field(min_length=1, max_length=255)
    """Exit statuses."""
    container_name: Name | None = None
    """Container looked at; default: any."""


class OnPodCondition(ManifestModel):
    """Matches a condition of the failed pod."""

    type: Name
    """Type of the condition, as DisruptionTarget."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Status of the condition."""


class FailureRule(ManifestModel):
    """One rule; the first that matches decides."""

    action: Annotated[FailureAction, BY_VALUE]
    """What a match does."""
    on_exit_codes: OnExitCodes | None = None
    """Match by exit status; exactly one of this and onPodConditions."""
    on_pod_conditions: list[OnPodCondition] | None = Field(default=None, min_length=1, max_length=20)
    """Match by condition of the pod; any of them."""


class FailurePolicy(ManifestModel):
    """Which ends of a trainer pod count; disruptions are ignored before any of these rules."""

    rules: list[FailureRule] = Field(default=[], max_length=16)
    """In order; without a match exit codes 1 and 2, with which a trainer says why it ended, fail the job, and any other
    end counts. A Job takes 20 rules, of which the operator needs a few."""


class TelemetrySpec(ManifestModel):
    """How the operator watches the manager."""

    poll_seconds: Annotated[int, Field(ge=2, le=60)] = 5
    """Seconds between polls of the manager's status; after three failed ones TrainerReady turns False."""
