"""The manager's numbers for Prometheus, read from the live counts at each scrape.

Cardinality is bounded: labels are sockets, drop kinds, pools, engine states, discard reasons, stages, parts of steps,
and the first few names of a reward function, never names of engines or samples.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polyrl.history.cost import cost_per_hour, spent
from polyrl.history.results import TRAINED_PHASES, evaluations
from polyrl.history.rows import MetricsRow
from polyrl.manifest.scaling import PricingSpec
from polyrl.status import FinishedStep, ManagerStatus, StepValue
from polyrl.wire import WeightsLoaded
from polyrl_rollout.manager.history import RunHistory
from polyrl_rollout.manager.peers.router import Traffic
from polyrl_rollout.manager.peers.sessions import ReceivedWeights
from polyrl_rollout.manager.reports import STEP_PARTS, STEP_SECONDS, TIMING

STAGES: Final = ("sft", *TRAINED_PHASES)
"""The only stages that become labels, whatever a trainer names: each new label is a series that Prometheus keeps."""
MAX_EVALUATION_NAMES: Final = 64
"""Names in a whole run's evaluations that are shown; the first ones stay."""
MAX_LABEL_CHARS: Final = 80
"""A number with a longer name is not shown."""


MAX_PAUSE_S: Final = 3600.0
"""Longest time of one part of one update: an engine's own words, and it may say anything."""


class UpdatePauses:
    """What loads of weights have cost engines, as they say."""

    def __init__(self) -> None:
        self.updates = 0
        self.seconds = dict.fromkeys(("wait", "load", "verify"), 0.0)
        self.pulled = 0.0
        """Seconds in which versions came, while engines went on."""

    def take(self, loaded: WeightsLoaded) -> None:
        """One load; that a version is served already, which is said in the same way, cost nothing."""
        parts = {"wait": loaded.wait_seconds, "load": loaded.load_seconds, "verify": loaded.verify_seconds}
        times = (*parts.values(), loaded.pull_seconds)
        if not all(math.isfinite(seconds) and 0 <= seconds <= MAX_PAUSE_S for seconds in times):
            return
        if not any(times):
            return
        self.updates += 1
        self.pulled += loaded.pull_seconds
        for part, seconds in parts.items():
            self.seconds[part] += seconds


class ManagerCollector(Collector):
    """Yields metric families made from the newest status and the sockets' traffic."""

    def __init__(
        self,
        status: Callable[[], ManagerStatus],
        traffic: Mapping[str, Traffic],
        refused: Mapping[str, int],
        weights: ReceivedWeights,
        pauses: UpdatePauses,
        sums: Mapping[str, int],
    ) -> None:
        """`traffic` and `refused` (handshakes) go by socket: `agents`, `trainer`; `sums` by what followed from them."""
        self._status, self._traffic, self._refused = status, traffic, refused
        self._weights, self._pauses, self._sums = weights, pauses, sums

    def collect(self) -> Iterator[Metric]:
        """One family per number."""
        yield from self._of_sockets()
        yield from self._of_updates()
        yield from _of_status(self._status())
        yield from _of_weights(self._weights)

    def _of_updates(self) -> Iterator[Metric]:
        yield CounterMetricFamily("polyrl_weight_loads", "Loads of weights by engines", value=self._pauses.updates)
        paused = CounterMetricFamily("polyrl_weight_pause_seconds", "Engines' time for them", labels=("part",))
        for part, seconds in self._pauses.seconds.items():
            paused.add_metric((part,), seconds)
        yield paused
        pulled = self._pauses.pulled
        yield CounterMetricFamily("polyrl_weight_pull_seconds", "In which engines' weights came", value=pulled)
        sums = CounterMetricFamily("polyrl_weight_sums", "What engines add weights up to", labels=("outcome",))
        for outcome, count in self._sums.items():
            sums.add_metric((outcome,), count)
        yield sums

    def _of_sockets(self) -> Iterator[Metric]:
        frames = CounterMetricFamily("polyrl_frames", "ZeroMQ frames", labels=("socket", "direction"))
        size = CounterMetricFamily("polyrl_frame_bytes", "Bytes of ZeroMQ frames", labels=("socket", "direction"))
        dropped = CounterMetricFamily("polyrl_frames_dropped", "Frames received and dropped", labels=("socket", "kind"))
        unsent = CounterMetricFamily("polyrl_frames_unsent", "Frames not sent", labels=("socket", "why"))
        refused = CounterMetricFamily("polyrl_handshakes_refused", "Peers with a wrong key", labels=("socket",))
        for name, traffic in self._traffic.items():
            frames.add_metric((name, "in"), traffic.frames_in)
            frames.add_metric((name, "out"), traffic.frames_out)
            size.add_metric((name, "in"), traffic.bytes_in)
            size.add_metric((name, "out"), traffic.bytes_out)
            refused.add_metric((name,), self._refused[name])
            for kind, count in traffic.dropped.items():
                dropped.add_metric((name, kind), count)
            for why, count in traffic.unsent.items():
                unsent.add_metric((name, why), count)
        yield from (frames, size, dropped, unsent, refused)


class RunCollector(Collector):
    """What the run learns, how long its steps take, and what it costs. A number that is not known is not there."""

    def __init__(self, status: Callable[[], ManagerStatus], history: RunHistory, prices: PricingSpec) -> None:
        self._status, self._history, self._prices = status, history, prices
        self._named: set[str] = set()
        """Numbers of evaluations that have a series."""

    def collect(self) -> Iterator[Metric]:
        """One family per number."""
        reward = self._status().values.get(StepValue.REWARD)
        if reward is not None:
            yield GaugeMetricFamily("polyrl_reward", "Mean reward of the last step", value=reward)
        newest = {row.phase: row for row in self._history.rows}
        if "eval" in newest:
            yield self._evaluation(newest["eval"])
        yield from _steps({stage: newest[stage] for stage in STAGES if stage in newest})
        yield from map(_of_step, self._status().finished_steps[-1:])
        yield from self._left_out()
        yield from self._cost()

    def _evaluation(self, row: MetricsRow) -> Metric:
        family = GaugeMetricFamily("polyrl_evaluation", "Numbers of the last evaluation", labels=("name",))
        for name, value in evaluations([row])[0].values.items():
            if len(name) <= MAX_LABEL_CHARS and (name in self._named or len(self._named) < MAX_EVALUATION_NAMES):
                self._named.add(name)
                family.add_metric((name,), value)
        return family

    def _left_out(self) -> Iterator[Metric]:
        family = CounterMetricFamily("polyrl_reported_left_out", "Left out of the trainer's reports", labels=("what",))
        for what, count in self._history.left_out.items():
            if count:
                family.add_metric((what,), count)
        if family.samples:
            yield family

    def _cost(self) -> Iterator[Metric]:
        labels = ("pool", "currency")
        total = CounterMetricFamily("polyrl_cost", "Money since this manager began", labels=labels)
        rate = GaugeMetricFamily("polyrl_cost_per_hour", "Money per hour, as of now", labels=labels)
        for pool, amount in spent(self._prices, self._history.seconds(time.time())).items():
            total.add_metric((pool, self._prices.currency), amount)
        for pool, amount in cost_per_hour(self._prices, self._history.machines(time.time())).items():
            rate.add_metric((pool, self._prices.currency), amount)
        yield from (family for family in (total, rate) if family.samples)


def _steps(newest: Mapping[str, MetricsRow]) -> Iterator[Metric]:
    """A gauge, for a trainer that goes back to a checkpoint does steps again."""
    steps = GaugeMetricFamily("polyrl_steps", "Whole steps", labels=("stage",))
    seconds = GaugeMetricFamily("polyrl_step_seconds", "Wall time of the last step", labels=("stage",))
    parts = GaugeMetricFamily("polyrl_step_part_seconds", "Parts of the last step", labels=("stage", "part"))
    for stage, row in newest.items():
        steps.add_metric((stage,), row.step)
        for name, value in row.values.items():
            if name == STEP_SECONDS:
                seconds.add_metric((stage,), value)
            elif name.startswith(TIMING) and name.removeprefix(TIMING) in STEP_PARTS:
                parts.add_metric((stage, name.removeprefix(TIMING)), value)
    yield from (family for family in (steps, seconds, parts) if family.samples)


def _of_status(status: ManagerStatus) -> Iterator[Metric]:
    engines = GaugeMetricFamily("polyrl_engines", "Live engines", labels=("pool", "state"))
    counts = Counter((engine.pool.value, engine.state.value) for engine in status.engines)
    for labels, count in counts.items():
        engines.add_metric(labels, count)
    yield engines
    yield CounterMetricFamily("polyrl_engines_lost", "Engines whose lease ran out", value=status.engines_lost)
    departed = sum(bool(engine.departed) for engine in status.engines)
    yield GaugeMetricFamily(
        "polyrl_engines_departed", "Live engines whose tokens were not the policy's", value=departed
    )
    share = status.values.get(StepValue.LARGEST_ENGINE_SHARE)
    if share is not None:
        yield GaugeMetricFamily("polyrl_engine_share", "Largest share of a step that one engine drew", value=share)
    yield GaugeMetricFamily("polyrl_running", "Samples assigned now", value=sum(e.running for e in status.engines))
    yield GaugeMetricFamily("polyrl_weight_version", "Newest weight version", value=status.weight_version)
    yield from _of_samples(status)
    tokens = CounterMetricFamily("polyrl_tokens", "Tokens of all samples", labels=("fate",))
    for fate in ("generated", "kept", "regenerated"):
        tokens.add_metric((fate,), getattr(status.tokens, fate))
    yield tokens
    yield CounterMetricFamily("polyrl_delta_bytes", "Bytes of token deltas received", value=status.delta_bytes)


def _of_weights(received: ReceivedWeights) -> Iterator[Metric]:
    family = CounterMetricFamily("polyrl_weight_bytes", "Bytes of weights that engines received", labels=("source",))
    family.add_metric(("publisher",), received.of_publisher)
    family.add_metric(("peers",), received.of_peers)
    yield family
    yield CounterMetricFamily(
        "polyrl_false_chunks", "Chunks of weights that engines refused of each other", value=received.false_chunks
    )


def _of_step(step: FinishedStep) -> Metric:
    family = GaugeMetricFamily("polyrl_step_engine_seconds", "Engines' time for the last step", labels=("part",))
    family.add_metric(("busy",), step.busy_engine_seconds)
    family.add_metric(("shared",), step.shared_engine_seconds)
    family.add_metric(("evaluation",), step.evaluation_engine_seconds)
    return family


def _of_samples(status: ManagerStatus) -> Iterator[Metric]:
    yield CounterMetricFamily("polyrl_samples_submitted", "Samples submitted", value=status.samples.submitted)
    yield CounterMetricFamily(
        "polyrl_samples_acknowledged",
        "Samples trained",
        value=status.samples.acknowledged + status.samples.offered_again,
    )
    yield GaugeMetricFamily("polyrl_samples_open", "Samples without an end", value=status.samples.open)
    discarded = CounterMetricFamily("polyrl_samples_discarded", "Samples discarded", labels=("reason",))
    for reason, count in status.samples.discarded.items():
        discarded.add_metric((reason,), count)
    yield discarded
