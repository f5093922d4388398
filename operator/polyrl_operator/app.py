"""One replica of the operator, wired: who feeds whom, which tasks run, and how it ends."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import structlog
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from typer import Option

from polyrl.cluster import names
from polyrl.cluster.fleet.certificate import LIFE_S
from polyrl.cluster.resources.owner import Settings
from polyrl.errors import ProtocolError
from polyrl_operator import health
from polyrl_operator.api.client import ApiError, Client, ClusterClock
from polyrl_operator.api.connect import load_configuration, stream_session
from polyrl_operator.api.kinds import CLAIM, JOB, SECRET, ResourceKind
from polyrl_operator.informer.cache import Cache, JobKey
from polyrl_operator.informer.resync import Resync
from polyrl_operator.informer.watch import INACTIVITY_S, StreamMonitor, run_watches, watched_kinds
from polyrl_operator.leader import DEFAULT_TERMS, Leader, Terms, service_account
from polyrl_operator.managers.client import ManagerClient, manager_session
from polyrl_operator.managers.poller import ManagerPoller
from polyrl_operator.metrics import Metrics, RequestCounter
from polyrl_operator.metrics_readers import MetricsReaders
from polyrl_operator.reconciler.events import SENDERS, Events
from polyrl_operator.reconciler.executor import Executor
from polyrl_operator.reconciler.reconciler import WORKERS, Reconciler
from polyrl_operator.reconciler.work_queue import WorkQueue
from polyrl_operator.secret import ManagerCredentials, load, make_certificate, manager_credentials, server_tls

log = structlog.get_logger(__name__)


METRICS_HOST: Final = "polyrl-operator"
"""In the certificate of its metrics, which is drawn at each start; Prometheus does not verify it, and shows a token."""


FORBIDDEN: Final = 403

CLOSED_S: Final = 30.0
"""Between two looks at which namespaces may be read: well before kopf gives up one that may not."""


def _identity() -> str:
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class Options:
    """Options of one replica. Every field but the last two is a flag of `python -m polyrl_operator`, and is also read
    from the environment as POLYRL_<FLAG>."""

    manager_image: Annotated[str, Option(help="Image of managers.")]
    trainer_image: Annotated[str, Option(help="Default image of trainers.")]
    rollout_image: Annotated[str, Option(help="Default image of rollouts.")]
    namespace: Annotated[list[str] | None, Option(help="Namespace whose jobs are run; repeatable.")] = None
    all_namespaces: Annotated[bool, Option(help="Run jobs of all.")] = False
    nodes: Annotated[bool, Option(help="Watch nodes and NodeClaims.")] = True
    operator_namespace: Annotated[str, Option(envvar="POD_NAMESPACE", help="Of the operator's own pod.")] = "default"
    lease_namespace: Annotated[str, Option(help="Of the Lease.")] = "default"
    lease_name: Annotated[str, Option(help="Of the Lease.")] = "polyrl-operator"
    image_pull_policy: str = "IfNotPresent"
    image_pull_secret: Annotated[list[str] | None, Option(help="Secret by which jobs' pods pull; repeatable.")] = None
    cluster_domain: str = "cluster.local"
    dns_namespace: Annotated[str, Option(help="Where the cluster's DNS has its pods.")] = "kube-system"
    dns_address: Annotated[list[str] | None, Option(help="DNS that is no pod, as 169.254.20.10/32; repeatable.")] = None
    trainer_priority_class: str = ""
    rollout_priority_class: str = ""
    manager_metrics_port: Annotated[int, Option(help="Managers' plain port for Prometheus; 0: none.")] = 0
    host: Annotated[str, Option(help="Address of both ports.")] = "0.0.0.0"
    metrics_port: int = 8080
    metrics_secure: Annotated[bool, Option(help="Metrics over TLS, for tokens that may read them.")] = True
    health_port: int = 8081
    """0: one that is free."""
    kubeconfig: Annotated[Path | None, Option(envvar="KUBECONFIG", help="Outside a cluster; default: the user's.")] = (
        None
    )
    watch_silence: Annotated[float, Option(min=1, help="Seconds after which a silent watch begins anew.")] = (
        INACTIVITY_S
    )
    log_level: Annotated[str, Option(help="debug, info, warning, error.")] = "info"
    identity: str = field(default_factory=_identity)
    """Name of this replica in the Lease and in Events: its pod's."""
    terms: Terms = DEFAULT_TERMS

    @property
    def settings(self) -> Settings:
        """What jobs' objects depend on."""
        shared = {one.name: getattr(self, one.name) for one in fields(Settings) if hasattr(self, one.name)}
        pulled_by, dns = tuple(self.image_pull_secret or ()), tuple(self.dns_address or ())
        return Settings(**shared, image_pull_secrets=pulled_by, dns_addresses=dns)

    @property
    def namespaces(self) -> tuple[str, ...] | None:
        """None: all."""
        return None if self.all_namespaces else tuple(dict.fromkeys(self.namespace or ()))


class Operator:
    """All parts, made inside a running loop; its `tasks` are run side by side."""

    def __init__(
        self, options: Options, api: ApiClient, managers: aiohttp.ClientSession, requests: RequestCounter
    ) -> None:
        self.options, self.requests = options, requests
        self.clock = ClusterClock()
        self.reviews = Client(api, clock=self.clock)
        """Asks for reviews, in a standby as well."""
        self.leader = Leader(
            Client(api, clock=self.clock),
            options.lease_namespace,
            options.lease_name,
            identity=options.identity,
            terms=options.terms,
            owner=service_account(),
        )
        self.client = Client(api, may_write=self.leader.leads, clock=self.clock)
        self.queue = WorkQueue()
        self.cache = Cache(self.queue.add, hurry=self.queue.hurry)
        self.metrics = Metrics(requests)
        self.events = Events(self.client, options.identity)
        self.resync = Resync(self.client, self.cache, options.namespaces, nodes=options.nodes)
        self.streams = StreamMonitor(on_gap=self.resync.request)
        self.managers = ManagerPoller(
            ManagerClient(managers),
            self._credentials,
            wake=self.queue.add,
            confirmed=lambda key, uid: self.reconciler.confirm_drain(key, uid),
            drains=self.metrics,
            now=self.clock.now,
        )
        self.reconciler = Reconciler(
            self.cache,
            self.client,
            executor=Executor(self.client, self.cache, self.events, self.managers),
            managers=self.managers,
            queue=self.queue,
            metrics=self.metrics,
            settings=options.settings,
            sees_nodes=options.nodes,
        )
        self._gauges()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """All that runs side by side, but for the watches."""
        return [
            self.leader.run(self._lead, self._stand_by),
            self.resync.run(self._wake_all),
            *(self.events.send() for _ in range(SENDERS)),
            *(self.reconciler.work(self.resync.until_ready) for _ in range(WORKERS)),
        ]

    def checks(self, watched: tuple[ResourceKind, ...]) -> list[health.Check]:
        """What /healthz checks."""
        namespaces = self.options.namespaces or (None,)
        paths = [kind.path(one) for kind in watched for one in (namespaces if kind.namespaced else (None,))]
        return [
            health.silent_watches(self.streams.ages, paths, health.SILENCES * self.options.watch_silence),
            health.too_old("a job has been reconciled", self.reconciler.longest, health.RECONCILE_S),
            health.too_old("no job has been taken up, though some wait,", self._stalled_for, health.QUEUE_S),
        ]

    def ready(self) -> bool:
        """A leader has read everything; a standby is ready to lead."""
        return self.resync.ready or not self.leader.leads()

    def _longest_wait(self) -> float:
        """Only a leader with everything read reconciles."""
        return self.queue.oldest_age() if self.resync.ready else 0.0

    def _stalled_for(self) -> float:
        return self.queue.stalled_for() if self.resync.ready else 0.0

    def _lead(self) -> None:
        if self.leader.taken_over:
            self.reconciler.take_over()
        self.resync.begin()

    def _stand_by(self) -> None:
        self.resync.end()
        self.reconciler.stand_by()
        self.managers.stop()

    def _wake_all(self) -> None:
        for key in self.cache.all_jobs():
            self.queue.add(key)

    async def _credentials(self, key: JobKey) -> ManagerCredentials:
        secret = await self.client.get(SECRET, key.namespace, names.keys_secret_name(key.name))
        if secret is None:
            raise ProtocolError(f"{key}: there is no Secret {names.keys_secret_name(key.name)}")
        return manager_credentials(secret)

    def _gauges(self) -> None:
        gauge = self.metrics.gauge
        gauge("polyrl_queue_length", "Jobs that are to be reconciled.", lambda: float(len(self.queue)))
        gauge("polyrl_queue_age_seconds", "Wait of the job that has waited longest.", self._longest_wait)
        gauge("polyrl_leads", "1 when this replica holds the Lease.", lambda: float(self.leader.leads()))
        gauge("polyrl_events_dropped", "Events that were not stored.", lambda: float(self.events.dropped))
        ages = self.streams.ages
        gauge("polyrl_watch_silence_seconds", "Of the most silent watch.", lambda: max(ages().values(), default=0.0))


@asynccontextmanager
async def operator(options: Options, configuration: Configuration) -> AsyncIterator[Operator]:
    """An operator with its connections, which are closed at the end; nothing runs yet."""
    requests = RequestCounter()
    configuration.trace_configs = [requests.trace()]
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(ApiClient(configuration))
        managers = await stack.enter_async_context(manager_session())
        made = Operator(options, api, managers, requests)
        stack.push_async_callback(made.leader.release)
        stack.push_async_callback(made.managers.close)
        yield made


async def run_operator(options: Options) -> None:
    """Until a signal ends it, or other namespaces may be read than at its start. Raises UserError when no cluster is
    reached, and whatever a part failed with."""
    configuration = await load_configuration(options.kubeconfig)
    async with AsyncExitStack() as stack:
        asking = Client(await stack.enter_async_context(ApiClient(configuration)))
        given, closed = options.namespaces, await closed_namespaces(asking, options.namespaces or ())
        if closed:
            log.error("namespaces may not be read; their jobs are left alone until they may", namespaces=sorted(closed))
            options = replace(options, namespace=[one for one in given or () if one not in closed])
        one = await stack.enter_async_context(operator(options, configuration))
        # Whether this cluster has Karpenter's NodeClaims.
        claims = options.nodes and CLAIM.plural in await one.client.discover(CLAIM)
        watched = watched_kinds(nodes=options.nodes, claims=claims)

        def connect() -> tuple[aiohttp.ClientSession, str]:
            traces = [one.requests.trace()]
            return stream_session(configuration, one.streams.middleware, trace_configs=traces), configuration.host

        readers = MetricsReaders(one.reviews) if options.metrics_secure else None
        tls = server_tls(make_certificate([METRICS_HOST])) if options.metrics_secure else None
        for app, port, secured in (
            (health.metrics_app(one.metrics.registry, readers), options.metrics_port, tls),
            (health.health_app(one.checks(watched), one.ready), options.health_port, None),
        ):
            close, bound = await health.serve(app, options.host, port, secured)
            stack.push_async_callback(close)
            log.info("listens", port=bound, paths=sorted({one.canonical for one in app.router.resources()}))
        renewals = [] if tls is None else [_renew(tls)]
        watches = run_watches(one.cache, connect, options.namespaces, watched, options.watch_silence)
        await _until_first_ends([watches, *one.tasks(), *renewals, until_others(asking, given or (), closed)])


async def closed_namespaces(client: Client, namespaces: Sequence[str]) -> set[str]:
    """Namespaces that may not be read, while others may: whoever deletes his own takes the Role in it along. Raises
    ApiError."""
    closed = set()
    for namespace in namespaces if len(namespaces) > 1 else ():
        try:
            await client.get(JOB, namespace, "any")
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            closed.add(namespace)
    return set() if len(closed) == len(namespaces) else closed


async def until_others(client: Client, namespaces: Sequence[str], closed: set[str]) -> None:
    """Until others are closed than these: a watch that may not be read would end the operator for all namespaces."""
    while True:
        await asyncio.sleep(CLOSED_S)
        with suppress(ApiError):
            if await closed_namespaces(client, namespaces) != closed:
                log.warning("other namespaces may be read than at the start; the operator is to be restarted")
                return


async def _renew(tls: ssl.SSLContext) -> None:
    """Serves a fresh certificate whenever half of a life is over."""
    while True:
        await asyncio.sleep(LIFE_S / 2)
        load(tls, make_certificate([METRICS_HOST]))


async def _until_first_ends(work: list[Coroutine[Any, Any, None]]) -> None:
    """The watches end when a signal comes; that anything else ends is a fault, and is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
