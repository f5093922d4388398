"""What runs: the single description of every worker of a job, as data.

`workers_of` renders role, argv and environment once, for processes and for pods; only the `RunLocation` differs.
Secrets never appear here: a worker is given the path of its own key file.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from polyrl.manifest.environment import AS_NVIDIA_SMI, EVERY_WORKER, GPU_ORDER, USER_CODE, VISIBLE_GPUS
from polyrl.manifest.job import JobSpec
from polyrl.manifest.rollout import WeightExchange
from polyrl.sample import Pool

NAME_SLOT: Final = "{name}"
"""Stands for the worker's own name in the argv of a template."""

ENGINE_SLOT: Final = "{engine}"
"""Stands for a reserved engine's number in its trainer's container."""
ENGINES_MODULE: Final = "polyrl_trainer.container"
"""What runs a trainer and its engines in one container."""

EVERYWHERE: Final = "*"
"""Address to listen on that means all of the machine's, of IPv4 and IPv6."""
LOOPBACK: Final = "127.0.0.1"

EXCHANGE_LEAST_BYTES: Final = 32 << 20
"""Bytes that rollouts have to get of a version, all together, for them to ask each other: the trainer sends as much in
a third of a second by a link of 1 Gbit/s, and to ask each other costs about as long."""

MANAGER_GRACE_S: Final = 3.0
"""The manager holds nothing that outlives its run; it only says goodbye."""

TRAINER_END_S: Final = 5
"""Seconds of a trainer's grace for what follows its last checkpoint: goodbye to the manager, and sinks."""

POD_MAX_MANAGER_OUTAGE_S: Final = 1800.0
"""How long a trainer's pod bears the manager's absence: an autoscaler takes up to 900 s for a node, perhaps twice."""

HANDED_OVER_EXIT: Final = 143
"""Exit code of a trainer that was asked to leave, saved, and wants a successor; what shells say of SIGTERM."""

TEMPORARY_EXIT: Final = 75
"""Exit code of a trainer in a pod that waited in vain for others, or broke for a reason unknown to it: it said nothing
of an end, and another try may do better. Of a trainer anywhere that lost one of its ranks. An agent's, whose engine was
killed or not ready in time. EX_TEMPFAIL of sysexits.h."""

USER_ERROR_EXIT: Final = 2
"""Exit code by which a worker reports that the user's input is wrong."""

CANNOT_GO_ON_EXIT: Final = 78
"""Exit code of a trainer in a pod that cannot go on from what is saved with the job as it is written: what was learned
waits for another edit. EX_CONFIG of sysexits.h."""

EXPLAINED_EXITS: Final = (1, USER_ERROR_EXIT, CANNOT_GO_ON_EXIT)
"""Exit codes of a trainer that printed why it ended, and would end so again; one that was killed explains nothing."""

FAILED_STARTS_LIMIT: Final = 3
"""Failures at start in a row that are no bad luck: a wrong setting fails every time. A local run then gives the role
up, and a cluster's status reports it."""


class Role(StrEnum):
    """What a worker is for."""

    MANAGER = "manager"
    """Holds the ledger, and connects engines with the trainer."""
    TRAINER = "trainer"
    """Trains the model."""
    RESERVED = "reserved"
    """An engine on the trainer's own devices."""
    ROLLOUT = "rollout"
    """An engine on a machine of its own."""


@dataclass(frozen=True)
class Worker:
    """One process, or one pod, to start."""

    name: str
    """Unique within the run, also over time: a replacement takes a new one."""
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the little that the fleet passes on."""
    inherits: tuple[str, ...] = EVERY_WORKER
    """Names, or patterns of names, that a process takes over from the environment of who starts it; pods have none."""
    grace_s: float = MANAGER_GRACE_S
    """Time from being asked to end until being ended by force."""
    gpus: tuple[str, ...] = ()
    """Names of its GPUs on this machine; empty: whatever there is."""

    def named(self, name: str) -> Worker:
        """This template as a worker called `name`."""
        return replace(self, name=name, argv=tuple(part.replace(NAME_SLOT, name) for part in self.argv))

    def on(self, gpus: tuple[str, ...]) -> Worker:
        """This worker with these GPUs and no others in sight; with none it is left as it is."""
        if not gpus:
            return self
        env = {VISIBLE_GPUS: ",".join(gpus), GPU_ORDER: AS_NVIDIA_SMI}
        return replace(self, gpus=gpus, env={**self.env, **env})


@dataclass(frozen=True)
class Pods:
    """What is so when workers are pods: files are mounted apart, ports are fixed, and others reach them by name."""

    job: str
    """Folder of job.json and of manager.json, which says where the manager is."""
    keys: str
    reserved_keys: str
    """Folder of the key file of the reserved engine, which is a process of the trainer's container."""
    journal: str
    """Folder of the manager's journal."""
    http_port: int
    agents_port: int
    trainer_port: int
    weights_port: int
    exchange_port: int
    """Where a rollout gives others chunks of weights."""
    advertise: str
    """Address under which others reach the trainer's pod."""
    metrics_port: int = 0
    """Where the manager's numbers are read without a token; 0: nowhere."""
    index: str = ""
    """Which one of the trainer's pods it is."""
    job_uid: str = ""
    """UID of the object on the cluster."""
    first_trainer: str = ""
    """HOST:PORT by which the trainer's other pods find its first one."""


@dataclass(frozen=True)
class RunLocation:
    """Where a job runs: absolute paths as the workers see them, and what they may use."""

    run: str
    """The run's folder."""
    manifest_dir: str
    """Folder that the manifest's relative paths start from."""
    python: str
    """Interpreter that has the components installed."""
    run_epoch: int
    """Fences what earlier starts of the same run left behind."""
    cpus: int
    """Cores that the run may use."""
    resume: str | None = None
    """Folder of an earlier run, or of this one, whose newest checkpoint is continued."""
    pods: Pods | None = None
    """None: processes beside each other, which write to the run's folder where they listen."""

    @property
    def run_name(self) -> str:
        """A name that no other run of this manifest has."""
        return self.pods.job_uid if self.pods else posixpath.basename(self.run)

    @property
    def job_file(self) -> str:
        return f"{self.pods.job if self.pods else self.run}/job.json"

    @property
    def keys_dir(self) -> str:
        return self.pods.keys if self.pods else f"{self.run}/keys"

    @property
    def endpoints_file(self) -> str:
        return f"{self.pods.job if self.pods else f'{self.run}/run/endpoints'}/manager.json"

    @property
    def journal_file(self) -> str:
        return f"{self.pods.journal if self.pods else self.run}/journal.sqlite"


@dataclass(frozen=True)
class Workers:
    """All that a job wants: one of each, and a template of which there are `rollouts`."""

    trainer: Worker
    manager: Worker | None
    reserved: Worker | None
    rollout: Worker | None
    rollouts: int
    trainer_restarts: int = 0
    """How often the trainer is started again by its own fault."""
    rollout_gpus: tuple[tuple[str, ...], ...] = ()
    """GPUs of each rollout at a time; empty: rollouts have none of their own."""


def wants_engines(spec: JobSpec) -> bool:
    """True when something is sampled: RL always does; the other modes do to evaluate, if they can score; a reward model
    writes nothing (a rule keeps its `data.eval` empty)."""
    return spec.recipe.mode.is_online or bool(spec.recipe.data.eval and spec.recipe.reward)


def exchanges_weights(spec: JobSpec, *, in_pods: bool) -> bool:
    """True when rollouts give each other chunks of weights."""
    choice = spec.rollout.weight_exchange
    return in_pods if choice is WeightExchange.AUTO else choice is not WeightExchange.NEVER


def workers_of(spec: JobSpec, place: RunLocation, pool: Pool = Pool.SPOT) -> Workers:
    """Every worker of the job, rollouts in `pool`. Modes that only evaluate get the reserved engine and no rollouts."""
    if not wants_engines(spec):
        return Workers(
            _trainer(spec, place, managed=False),
            None,
            reserved=None,
            rollout=None,
            rollouts=0,
            trainer_restarts=spec.backoff_limit,
        )
    trains = spec.recipe.mode.is_online
    reserved = spec.trainer.reserved_engine or not trains
    return Workers(
        trainer=_trainer(spec, place, managed=True),
        manager=_manager(place),
        reserved=_agent(spec, place, Role.RESERVED, Pool.RESERVED) if reserved else None,
        rollout=_agent(spec, place, Role.ROLLOUT, pool) if trains else None,
        rollouts=num_rollouts(spec) if trains else 0,
        trainer_restarts=spec.backoff_limit,
    )


def num_rollouts(spec: JobSpec) -> int:
    """Size of the fleet at the start: `replicas` held within its bounds, else the least, but one where allowed."""
    rollout = spec.rollout
    if rollout.replicas is None:
        return max(rollout.min_replicas, min(1, rollout.max_replicas))
    return max(rollout.min_replicas, min(rollout.replicas, rollout.max_replicas))


def _manager(place: RunLocation) -> Worker:
    argv = _module(place, "polyrl_rollout.manager", "manager", endpoints_flag=None if place.pods else "--endpoints")
    argv += ("--journal", place.journal_file)
    if (pods := place.pods) is not None:
        argv += ("--bind", EVERYWHERE, "--http-port", str(pods.http_port))
        argv += ("--agents-port", str(pods.agents_port), "--trainer-port", str(pods.trainer_port))
    argv += ("--tls-cert", f"{place.keys_dir}/tls.crt", "--tls-key", f"{place.keys_dir}/tls.key")
    if pods is not None:
        argv += ("--stay", *(("--metrics-port", str(pods.metrics_port)) if pods.metrics_port else ()))
    return Worker("manager", Role.MANAGER, argv=argv, env=_threads(1), grace_s=MANAGER_GRACE_S)


def _trainer(spec: JobSpec, place: RunLocation, *, managed: bool) -> Worker:
    argv = _module(place, "polyrl_trainer", "trainer", endpoints_flag="--manager-endpoints" if managed else None)
    argv += ("--manifest-dir", place.manifest_dir, "--run", place.run)
    argv += ("--grace", str(spec.trainer.grace_seconds - TRAINER_END_S))
    if spec.recipe.checkpoint.uri is not None:
        argv += ("--store", f"{spec.recipe.checkpoint.uri.rstrip('/')}/{place.run_name}")
    if place.resume is not None:
        argv += ("--resume", place.resume)
    if place.pods is not None:
        argv += ("--weights-port", str(place.pods.weights_port), "--advertise", place.pods.advertise)
        argv += ("--max-manager-outage", f"{POD_MAX_MANAGER_OUTAGE_S:g}", "--hand-over")
        if spec.trainer.replicas > 1:
            argv += ("--pod", place.pods.index, "--pods-at", place.pods.first_trainer)
    return Worker(
        "trainer",
        Role.TRAINER,
        argv=argv,
        env=_threads(_trainer_threads(spec, place)) | user_env(spec),
        inherits=user_inherits(spec),
        grace_s=float(spec.trainer.grace_seconds),
    )


def user_env(spec: JobSpec) -> dict[str, str]:
    """Variables of the user's code that the manifest itself gives."""
    return {one.name: one.value for one in spec.recipe.env if one.value is not None}


def user_inherits(spec: JobSpec) -> tuple[str, ...]:
    """Names that the process of the user's code takes over."""
    return (*EVERY_WORKER, *USER_CODE, *(one.name for one in spec.recipe.env if one.value is None))


def _agent(spec: JobSpec, place: RunLocation, role: Role, pool: Pool) -> Worker:
    own = NAME_SLOT if place.pods is None else "agent"
    if place.pods is not None and role is Role.RESERVED:
        place = replace(place, pods=replace(place.pods, keys=place.pods.reserved_keys))
    argv = _module(place, "polyrl_rollout.agent", own, endpoints_flag="--manager-endpoints")
    argv += ("--engine-name", NAME_SLOT, "--pool", pool.value)
    if role is Role.ROLLOUT and exchanges_weights(spec, in_pods=place.pods is not None):
        host, port = (LOOPBACK, 0) if place.pods is None else (EVERYWHERE, place.pods.exchange_port)
        least = 0 if spec.rollout.weight_exchange is WeightExchange.ALWAYS else EXCHANGE_LEAST_BYTES
        argv += ("--exchange-bind", host, "--exchange-port", str(port), "--exchange-least", str(least))
    return Worker(
        role.value,
        role,
        argv=argv,
        env=_threads(spec.rollout.engine.threads),
        grace_s=float(spec.rollout.drain_seconds),
    )


def _module(place: RunLocation, module: str, keys: str, endpoints_flag: str | None) -> tuple[str, ...]:
    argv: tuple[str, ...] = (place.python, "-m", module)
    argv += ("--job", place.job_file, "--keys", f"{place.keys_dir}/{keys}.key")
    if endpoints_flag is not None:
        argv += (endpoints_flag, place.endpoints_file)
    return (*argv, "--epoch", str(place.run_epoch))


def _trainer_threads(spec: JobSpec, place: RunLocation) -> int:
    """Cores that rollouts on the same machine leave free; the reserved engine generates while the learner waits, so it
    takes none."""
    beside = spec.recipe.mode.is_online and place.pods is None
    return max(1, place.cpus - (num_rollouts(spec) * spec.rollout.engine.threads if beside else 0))


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number)}
