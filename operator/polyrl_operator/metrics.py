"""Prometheus metrics of the operator. No label names a pod, so that their number does not grow with what happens."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Final

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from yarl import URL

from polyrl.manifest.status import JobStatus, RunState
from polyrl_operator.api.kinds import Permission, permission_for
from polyrl_operator.informer.cache import JobKey

RECONCILE_BUCKETS: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 10, 60)
DRAIN_BUCKETS: Final = (0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 15, 60)
"""Seconds; 2 is what is promised."""

JOB_LABELS: Final = ("namespace", "job")

AT_REST: Final = (RunState.SUSPENDED, RunState.COMPLETE, RunState.FAILED)
"""Such a job wants no rollouts: its status keeps the number with which it goes on, and an alert called it short."""


class RequestCounter(Collector):
    """Counts requests where bytes pass: in our client's session and in kopf's. The chart's Role is compared with it."""

    def __init__(self) -> None:
        self.counts: Counts[tuple[Permission, str]] = Counts()
        """By permission and status class, as `2xx`; `error` where no answer came."""

    def trace(self) -> aiohttp.TraceConfig:
        """Hooks for one session."""
        hooks = aiohttp.TraceConfig()
        hooks.on_request_end.append(self._on_end)
        hooks.on_request_exception.append(self._on_exception)
        return hooks

    def collect(self) -> Iterable[CounterMetricFamily]:
        labels = ("verb", "resource", "code")
        family = CounterMetricFamily("polyrl_api_requests", "Requests to the API server.", labels=labels)
        totals: Counts[tuple[str, str, str]] = Counts()
        for (permission, outcome), count in self.counts.items():
            resource = permission.resource if not permission.resource.startswith("/") else "discovery"
            totals[permission.verb, resource, outcome] += count
        for values, count in totals.items():
            family.add_metric(values, count)
        yield family

    async def _on_end(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, end: aiohttp.TraceRequestEndParams
    ) -> None:
        self._count(end.method, end.url, f"{end.response.status // 100}xx")

    async def _on_exception(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, end: aiohttp.TraceRequestExceptionParams
    ) -> None:
        self._count(end.method, end.url, "error")

    def _count(self, method: str, url: URL, outcome: str) -> None:
        self.counts[permission_for(method, url.path, watch="watch" in url.query), outcome] += 1


class Metrics:
    """Made once, filled by all."""

    def __init__(self, requests: RequestCounter) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=DRAIN_BUCKETS)
        self.reconciles = counter("polyrl_reconciles", "Reconciles of jobs.", ("outcome",))
        self.reconcile_seconds = seconds(
            "polyrl_reconcile_seconds", "Duration of a reconcile.", buckets=RECONCILE_BUCKETS
        )
        self.status_writes = counter("polyrl_status_writes", "Statuses written.")
        self._drain_seconds = seconds(
            "polyrl_drain_seconds", "From the first sign of a rollout's end to its drain confirmed by the manager."
        )
        self._drain_failures = counter("polyrl_drain_failures", "Drains that no manager confirmed in time.")
        self._notice_seconds = seconds(
            "polyrl_preemption_notice_seconds", "From the first sign of a rollout's end to its end."
        )
        self._jobs = gauge("polyrl_jobs", "Jobs by state.", ("state",))
        self._desired = gauge("polyrl_rollout_desired_replicas", "Rollouts wanted now.", JOB_LABELS)
        self._registered = gauge("polyrl_rollout_registered_replicas", "Rollouts that the manager knows.", JOB_LABELS)
        self._preemptions = gauge("polyrl_rollout_preemptions", "Rollouts taken away since the job began.", JOB_LABELS)
        self._states: dict[JobKey, str] = {}
        self._noticed: dict[JobKey, frozenset[str]] = {}
        registry.register(requests)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A number that is computed at each scrape."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def drained(self, seconds: float, known: bool) -> None:
        """A drain was confirmed; one for an engine that the manager did not know is not measured."""
        if known:
            self._drain_seconds.observe(seconds)

    def drain_failed(self) -> None:
        self._drain_failures.inc()

    def decided(self, key: JobKey, status: JobStatus) -> None:
        """A job's newest status."""
        before = self._states.get(key)
        if before != status.state:
            self._step(before, -1)
            self._step(status.state, +1)
            self._states[key] = status.state
        if status.state in AT_REST:
            self._desired.remove(*key)
            self._registered.remove(*key)
        else:
            self._desired.labels(*key).set(status.rollout.desired_replicas)
            self._registered.labels(*key).set(status.rollout.registered_replicas)
        self._preemptions.labels(*key).set(status.rollout.preemptions)
        ended = {one.pod_uid: one.notice_millis for one in status.recent_disruptions if one.delete_time is not None}
        for uid in ended.keys() - self._noticed.get(key, frozenset(ended)):
            self._notice_seconds.observe(ended[uid] / 1000)
        self._noticed[key] = frozenset(ended)

    def forget(self, key: JobKey) -> None:
        """The job is gone, or another replica shows it."""
        if self._noticed.pop(key, None) is None:
            return
        self._step(self._states.pop(key, None), -1)
        for gauge in (self._desired, self._registered, self._preemptions):
            gauge.remove(*key)

    def _step(self, state: str | None, by: int) -> None:
        if state is not None:
            self._jobs.labels(str(state)).inc(by)
