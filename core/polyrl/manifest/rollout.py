"""`spec.rollout`: the fleet that generates."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from polyrl.manifest.base import BY_VALUE, CLUSTER_ONLY, INT32_MAX, Count, ManifestModel, Positive
from polyrl.manifest.cluster import PodTemplate


class EngineType(StrEnum):
    """Which engine generates."""

    EMBEDDED = "embedded"
    """transformers' continuous batching, in a process of its own, on the CPU; for tiny and small models."""
    SGLANG = "sglang"
    """Stock SGLang over HTTP."""

    @property
    def is_server(self) -> bool:
        """True when its agent starts a server that has GPUs of its own and loads a model's folder."""
        return self is not EngineType.EMBEDDED


class WeightSwitch(StrEnum):
    """What becomes of the keys and values of sequences that run while an engine takes new weights."""

    RECOMPUTE = "recompute"
    """They are dropped, and computed anew by the new weights (SGLang's pause mode retract does the same): the rest of a
    sequence is drawn as a fresh engine would draw it, and everything that runs is read once more."""
    KEEP = "keep"
    """They stay (in_place): nothing is read again, and the new weights go on from what the old ones had read, which the
    learner cannot repeat; `rollout_corr/kl` shows how far its logprobs are then from the engine's."""


class EngineSpec(ManifestModel):
    """The engine beside each agent."""

    type: Annotated[EngineType, BY_VALUE] = EngineType.SGLANG
    """`sglang` is stock SGLang over HTTP; `embedded` is transformers' continuous batching, for tiny models and CPUs."""
    max_running: Annotated[int, Field(ge=1, le=65536)] = 256
    """Sequences one engine runs at once."""
    kv_tokens: Annotated[int, Field(ge=64, le=INT32_MAX)] = 65536
    """KV-cache room of the embedded engine, in tokens; SGLang measures its own."""
    max_context: Annotated[int, Field(ge=8, le=16_777_216)] = 4096
    """Longest prompt + response, in tokens."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of one embedded engine."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs of one machine over which SGLang spreads each layer; agents and scaling count them as one engine."""
    data_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of the weights behind one SGLang server, each on `tensorParallel` GPUs of their own, unless `args` hold
    `--enable-dp-attention`, which spreads attention over the same GPUs."""
    mem_fraction: Annotated[float, Field(ge=0.01, le=0.98)] | None = None
    """Share that SGLang takes, for weights, keys and values, of what is free on a GPU when it starts; default: its own
    choice, most of it. A reserved engine, which shares its GPU with the learner, has `trainer.reservedMemFraction`."""
    weight_switch: Annotated[WeightSwitch, BY_VALUE] = WeightSwitch.RECOMPUTE
    """What becomes of keys and values of sequences that run while new weights are loaded, with `algorithm.maxStaleness`
    above 0: `recompute` drops them and reads the sequences again, `keep` goes on from them. New prompts never reuse
    what older weights computed."""
    args: list[Annotated[str, Field(max_length=1024)]] = Field(default=[], max_length=128)
    """Further arguments of `sglang.launch_server`, as written on its command line. Quantised weights and engines over
    several machines are refused."""


class FaultAction(StrEnum):
    """What a declared fault does."""

    KILL = "Kill"
    """SIGKILL without notice, as a spot machine that vanishes."""
    PREEMPT = "Preempt"
    """A notice, then the end `noticeSeconds` later."""


class FaultSpec(ManifestModel):
    """A fault that the run injects into itself, to show that nothing is lost; for tests and demonstrations only."""

    at_step: Count
    """RL step after whose start it happens."""
    action: Annotated[FaultAction, BY_VALUE]
    """Kill ends the rollout without notice; Preempt gives it `noticeSeconds`."""
    rollout: Annotated[int, Field(ge=0, le=1023)] = 0
    """Which of the live preemptible rollouts, counted from the oldest."""
    notice_seconds: Annotated[int, Field(ge=0, le=600)] = 5
    """Seconds between notice and end; only for Preempt."""


class UpdateSpec(ManifestModel):
    """How a changed template reaches running rollouts."""

    type: Literal["OnDelete", "Rolling"] = "Rolling"
    """Rolling replaces old pods between steps; OnDelete leaves them until something else ends them."""
    max_unavailable: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts that an update may take away at once."""


class FallbackSpec(ManifestModel):
    """On-demand stand-ins while spot is not to be had; spot replaces them one by one when it returns."""

    enabled: bool = False
    """Only with policy SpotPreferred."""
    after_seconds: Count = 300
    """Seconds that spot must have been pending or backed off before a stand-in starts."""
    max_replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Stand-ins at once; default: all missing rollouts."""


class CapacityPolicy(StrEnum):
    """What machines rollouts run on."""

    SPOT = "Spot"
    """Spot machines, beside the first `baseOnDemand`."""
    SPOT_PREFERRED = "SpotPreferred"
    """Spot first; `fallback` says when on-demand stands in."""
    ON_DEMAND = "OnDemand"
    """On-demand machines only."""


class CapacitySpec(ManifestModel):
    """What machines rollouts run on."""

    policy: Annotated[CapacityPolicy, BY_VALUE] = CapacityPolicy.SPOT
    """Spot only, spot with on-demand stand-ins, or on-demand only."""
    base_on_demand: Annotated[int, Field(ge=0, le=1024)] = 0
    """The first so many rollouts are on-demand, so that some always stay."""
    fallback: FallbackSpec = FallbackSpec()
    """When on-demand stands in for spot."""
    preset: Literal["None", "Karpenter", "GKE", "AKS", "EKSManaged"] = "None"
    """Node affinity and tolerations of this platform's spot machines; None: the template says it all."""
    metadata_service: bool = False
    """Rollouts ask the machine's metadata service (169.254.169.254) for notices, with a preset only. It opens that
    address to all of their pod, where a machine may also give away the accounts of its node: switch it on only where it
    does not, or where notices come by no node or pod."""


class WeightExchange(StrEnum):
    """Whether rollouts give each other chunks of new weights."""

    AUTO = "Auto"
    """In pods, where each has a link of its own, when there is enough to send; not in a local run, where all share a
    machine with the trainer."""
    ALWAYS = "Always"
    """In a local run too, and however little there is to send."""
    NEVER = "Never"
    """Each takes all from the trainer."""


class WeightDeltas(StrEnum):
    """Whether a version travels as what changed since the one before."""

    AUTO = "Auto"
    """Where that is quicker, by what was measured."""
    ALWAYS = "Always"
    """However small, as long as all deltas since the last whole version have half its bytes at most."""
    NEVER = "Never"
    """Every version whole."""


class MooncakeSpec(ManifestModel):
    """New weights go from the trainer to rollouts by the Mooncake transfer engine."""

    clear_text: Literal["Accepted"]
    """`Accepted`: the engine's wire is clear text and asks for no key. Whoever reaches its ports (5100 to 5163 of the
    trainer's and the rollouts' machines, on all addresses) may read the weights, and may write into the memory in which
    they arrive. False bytes are found by their hashes and never loaded; secret they are not."""
    rdma_devices: Annotated[str, Field(max_length=1024, pattern=r"^([A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+)*)?$")] = ""
    """RDMA devices of each machine, such as `mlx5_0,mlx5_1`; empty: TCP, which is slower than the sealed connections
    that go without this field."""


class RolloutSpec(ManifestModel):
    """The fleet."""

    engine: EngineSpec = EngineSpec()
    """The engine beside each agent."""
    weight_exchange: Annotated[WeightExchange, BY_VALUE] = WeightExchange.AUTO
    """Whether rollouts give each other new weights, so that the trainer sends each byte about once however many there
    are: `Auto` on a cluster (by one port between rollouts) and from 32 MiB on, summed over the fleet, `Always` in a
    local run and for less too, `Never`. Engines on the trainer's own devices take theirs from the trainer alone."""
    weight_deltas: Annotated[WeightDeltas, BY_VALUE] = WeightDeltas.AUTO
    """Whether new weights travel as what changed since the version before: `Auto` where that is quicker by what was
    measured, `Always` however small they are, as long as the changes since the last whole version have half its bytes
    at most, `Never`. Either way engines have the same weights to the bit."""
    mooncake: MooncakeSpec | None = None
    """Whole chunks of new weights travel by the Mooncake transfer engine, for networks with RDMA; needs
    `polyrl[mooncake]` on all sides, a trainer without it refuses to start, and a rollout without it takes them sealed.
    Default: all bytes are sealed."""
    replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Start value of the fleet (scaling mode Gap), or its size (Manual, External); default: minReplicas, at least 1 if
    maxReplicas allows. A value outside minReplicas and maxReplicas is clamped, not refused: autoscalers overshoot."""
    min_replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rollouts below which only a budget goes; 0 lets the trainer's own engine do all the work when spot costs much."""
    max_replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Rollouts above which scaling never goes."""
    drain_seconds: Annotated[int, Field(ge=0, le=600)] = 20
    """Seconds a rollout gets to finish or hand back its samples after a notice; clouds give 15 to 120."""
    lease_seconds: Annotated[int, Field(ge=2, le=600)] = 3
    """Seconds of silence after which an engine gets no new work, and what it runs goes to others that are expected to
    be done sooner. Its agent gives a sign of life each second; of one far away more may be late."""
    lost_after_seconds: Annotated[int, Field(ge=2, le=3600)] = 15
    """Seconds of silence after which an engine is gone, and all that it ran is moved."""
    template: Annotated[PodTemplate, CLUSTER_ONLY] | None = None
    """Pod of one rollout; default: the operator's own image. A change reaches running rollouts as `update` says."""
    update: Annotated[UpdateSpec, CLUSTER_ONLY] = UpdateSpec()
    """How a changed template reaches running rollouts."""
    capacity: Annotated[CapacitySpec, CLUSTER_ONLY] = CapacitySpec()
    """What machines rollouts run on."""
    pending_timeout_seconds: Annotated[int, Field(ge=60, le=INT32_MAX), CLUSTER_ONLY] = 1200
    """Seconds a pod may stay unscheduled before its pool backs off; longer than autoscalers need for a node (900)."""
    startup_timeout_seconds: Annotated[Positive, CLUSTER_ONLY] = 1800
    """Seconds from scheduled to registered at the manager; then the pod is replaced, counted as a failure."""
