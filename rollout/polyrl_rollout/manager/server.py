"""The manager itself: two ROUTERs, the HTTP API and one timer around the ledger.

    frames -> sessions -> ledger -> events to the journal, messages to the outbox
    end of a batch of frames -> journal commits; under load at most every GATHER_S
    outbox waits for the disk -> journal syncs in its own thread -> what rests on commits before that leaves
    timer (at ledger.next_due, no polling) -> ledger.tick -> the same

No message leaves before the events that it depends on are safe: `polyrl.ledger.journal.durability` says how safe. The
run ends after the trainer's FinishRun: once all agents are gone and the final status was read, at the latest
FINISH_DEADLINE_S later; one that stays serves on.
A bug in a callback ends the process: a ledger that half-took a message must not go on. A connection that cannot be
accepted is none.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import prometheus_client
import structlog
import zmq
from aiohttp import web

from polyrl.control import Endpoints, bracketed
from polyrl.errors import PolyRLError, RunFailed
from polyrl.keys import ManagerKeys
from polyrl.ledger import Effects, Ledger
from polyrl.ledger.events import EngineDeparted, EngineGone, Reported
from polyrl.ledger.journal.durability import Outbox
from polyrl.ledger.status import Wait
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.scaling import PricingSpec
from polyrl.status import MAX_FETCHES, FetchStatus, ManagerStatus
from polyrl.wire import (
    AGENT_FRAME_BYTES,
    MAX_FRAME_BYTES,
    Deregister,
    Fenced,
    FetchReport,
    FinishRun,
    FromAgent,
    FromTrainer,
    ToTrainer,
    TrainerHello,
    TrainerReport,
    WeightsLoaded,
)
from polyrl.wire.roster import GATHER_NEWS_S
from polyrl.worker import EVERYWHERE
from polyrl_rollout.http_server import HttpServer
from polyrl_rollout.manager.api import ControlService, make_metrics_app
from polyrl_rollout.manager.group_commit import GroupCommit
from polyrl_rollout.manager.history import RunHistory
from polyrl_rollout.manager.journal import Journal, RevokedNames
from polyrl_rollout.manager.metrics import ManagerCollector, RunCollector, UpdatePauses
from polyrl_rollout.manager.peers.router import MAX_UNFINISHED_BYTES, Authenticator, Router
from polyrl_rollout.manager.peers.sessions import AgentSessions, TrainerSession
from polyrl_rollout.manager.reports import bounded_status
from polyrl_rollout.manager.sums import SumCheck

FINISH_DEADLINE_S: Final = 15.0
"""Longest time between the trainer's FinishRun and the manager's end, whatever agents do."""
GATHER_S: Final = 0.005
"""Pause between two commits while agents send: a commit costs as much as several frames, and agents themselves gather
tokens for longer. The trainer, which waits for its answers, is answered at once."""
LINGER_S: Final = 1.0
"""Time that the last messages get to leave."""
HTTP_SHUTDOWN_S: Final = 2.0
"""Time that open HTTP requests get to end."""

NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""What `accept` may fail with for which the connection is not to blame."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Listen:
    """Where the manager binds; host EVERYWHERE means all addresses, port 0 lets the system choose."""

    host: str = "127.0.0.1"
    agents_port: int = 0
    trainer_port: int = 0
    http_port: int = 0
    tls: ssl.SSLContext | None = None
    """None: the HTTP API is plain."""
    metrics_port: int | None = None
    """A port of its own for what Prometheus reads, plain and without a token; None: there is none."""


class Manager:
    """One running manager: `async with Manager(...) as manager: await manager.run()`."""

    def __init__(
        self,
        ledger: Ledger,
        keys: ManagerKeys,
        run_epoch: int,
        listen: Listen,
        journal: Journal | None = None,
        clock_s: float = 0.0,
        stays: bool = False,
        job: PolyRLJob | None = None,
    ) -> None:
        """`clock_s` is where the ledger's clock stood when its journal ended; without a journal nothing outlives us.
        One that `stays` shows the final status until it is stopped. `job`: for its page, and for what money is counted
        by."""
        self._ledger, self._journal, self._job = ledger, journal, job
        self._history = RunHistory(time.time(), resumed=clock_s > 0, lease_s=ledger.state.config.lease_s)
        self._keys, self._run_epoch, self._listen = keys, run_epoch, listen
        self._clock_s, self._resumes, self._stays = clock_s, clock_s > 0, stays
        self._gathered = Effects()
        self._fetches: dict[str, FetchStatus] = {}
        self._outbox, self._pauses = Outbox(), UpdatePauses()
        self._sums = SumCheck(ledger.state, refuse=self._refuse, note=self._note)
        self._revoked = RevokedNames(None if journal is None else journal.path.with_suffix(".revoked"))

    async def __aenter__(self) -> Self:
        """Binds everything. Raises RunFailed naming the port that is taken."""
        self._loop = asyncio.get_running_loop()
        self._clock_s -= self._loop.time()
        self._loop.set_exception_handler(self._on_broken_callback)
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._roster_timer: asyncio.TimerHandle | None = None
        self._gathering: asyncio.TimerHandle | None = None
        self._flushed_at = 0.0
        self._disk = None if self._journal is None else GroupCommit(self._journal, self._flush)
        self._finish_task: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = self._keys
        allowed = {"agents": keys.agent_public_key, "trainer": keys.trainer_public_key}
        self.authenticator = Authenticator(self._context, allowed)
        self.authenticator.start()
        # Whoever has the agents' key may be on another's machine; who has the trainer's has the run.
        self._agents_router = self._bind("agents", self._listen.agents_port, AGENT_FRAME_BYTES, MAX_UNFINISHED_BYTES)
        self._trainer_router = self._bind("trainer", self._listen.trainer_port, MAX_FRAME_BYTES)
        self.traffic = {"agents": self._agents_router.traffic, "trainer": self._trainer_router.traffic}
        self._agents = AgentSessions(
            self._agents_router,
            self._from_agent,
            keys.identity_key,
            lease_s=self._ledger.state.config.lease_s,
            revoked=self._revoked,
        )
        self._trainer = TrainerSession(self._trainer_router, self._from_trainer, self._take_fetch)
        self._control = ControlService(self._ledger, self._run_epoch, self, self._history, self._job)
        await self._open_http()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._disk is not None:
            await self._disk.close()
        try:
            if kind is None:
                self._flush_now()
        finally:
            await self._close()

    async def _close(self) -> None:
        self._control.feed.publish()
        await self._http.close()
        if self._metrics is not None:
            await self._metrics.close()
        if self._roster_timer is not None:
            self._roster_timer.cancel()
        self._agents_router.close(LINGER_S)
        self._trainer_router.close(LINGER_S)
        self.authenticator.stop()
        await asyncio.to_thread(self._context.term)
        if self._journal is not None:
            self._journal.close()

    @property
    def endpoints(self) -> Endpoints:
        """Where it listens."""
        host, port = self._http.address
        return Endpoints(
            agents=self._agents_router.endpoint,
            trainer=self._trainer_router.endpoint,
            http=f"{'http' if self._listen.tls is None else 'https'}://{bracketed(host)}:{port}",
            public_key=self._keys.public_key,
            run_epoch=self._run_epoch,
            pid=os.getpid(),
        )

    def status(self) -> ManagerStatus:
        """What GET /v1/status answers now."""
        return self._control.status()

    async def run(self) -> None:
        """Serves until the run is over or `stop` is called. Raises RunFailed when a callback broke."""
        if self._journal is not None:
            self._journal.begin(self._ledger.state, self.now())
        if self._resumes:
            self.deliver_and_settle(self._ledger.resume(self.now()))
        self._agents_router.start(self._agents.on_frame, self._gather)
        self._trainer_router.start(self._trainer.on_frame, self._settle)
        log.info("manager listens", **msgspec.to_builtins(self.endpoints))
        await self._ended

    def serve_with(self, tls: ssl.SSLContext) -> None:
        """Encrypts connections that come from now on with another certificate."""
        self._http.tls = tls

    async def revoke(self, engine: str) -> None:
        """Refuses an engine whose pod is gone, for good."""
        self._agents.revoke(engine)
        self._settle()
        await self.until_safe()

    def stop(self) -> None:
        """Ends `run` now."""
        if not self._ended.done():
            self._ended.set_result(None)

    def now(self) -> float:
        """The ledger's clock: goes on where the journal ended, stands still while no manager runs."""
        return self._clock_s + self._loop.time()

    def _from_agent(self, engine: str, message: FromAgent) -> None:
        if not self._sums.admits(engine, message):
            return
        self._deliver(self._ledger.from_agent(engine, message, self.now()))
        if engine not in self._ledger.state.engines:
            self._sums.sums.gone(engine)  # no event says when one ends that was not taken
        if isinstance(message, WeightsLoaded):
            self._pauses.take(message)

    def _note(self, engine: str, text: str) -> None:
        self._history.note_condition(engine, text, time.time())

    def _refuse(self, engine: str, reason: str) -> None:
        """For the ledger it has left; its agent ends."""
        if engine in self._ledger.state.engines:
            self._deliver(self._ledger.from_agent(engine, Deregister(reason), self.now()))
        self._gathered.to_agents.append((engine, Fenced(reason)))

    def _from_trainer(self, message: FromTrainer) -> Iterable[ToTrainer]:
        """Gives the answers to a greeting, safe to be sent; all other answers leave with the batch."""
        outcome = self._ledger.from_trainer(message, self.now())
        if isinstance(message, TrainerReport) and any(isinstance(event, Reported) for event in outcome.events):
            self._history.take_report(message, time.time())
            for event in outcome.events:
                if isinstance(event, EngineDeparted):
                    log.warning("an engine's tokens are not the policy's", engine=event.engine, measured=event.text)
        if isinstance(message, FinishRun) and self._finish_task is None:
            self._finish_task = asyncio.create_task(self._finish())
        if not isinstance(message, TrainerHello):
            self._deliver(outcome)
            return ()
        self._fetches.clear()
        self._keep(outcome)
        self._gathered.to_agents += outcome.to_agents
        self._flush_now()
        return outcome.to_trainer

    def _take_fetch(self, report: FetchReport) -> None:
        """For the status alone: nothing rests on it, so it is in no journal."""
        self._fetches.pop(report.pod, None)
        if len(self._fetches) >= MAX_FETCHES:
            del self._fetches[next(iter(self._fetches))]
        self._fetches[report.pod] = FetchStatus(
            pod=report.pod, place=report.place, fetched=report.fetched, total=report.total
        )
        self._control.feed.note_change()

    def _deliver(self, outcome: Effects) -> None:
        self._keep(outcome)
        self._gathered.to_agents += outcome.to_agents
        self._gathered.to_trainer += outcome.to_trainer

    def deliver_and_settle(self, outcome: Effects) -> None:
        self._deliver(outcome)
        self._settle()

    async def until_safe(self) -> None:
        """Returns once all commits so far would survive a power cut."""
        if self._disk is not None:
            await self._disk.until_safe()

    def _keep(self, outcome: Effects) -> None:
        if outcome.events:
            self._gathered.events += outcome.events
            if self._journal is not None:
                self._journal.append(outcome.events)
            self._history.take_events(outcome.events, time.time())
            for event in outcome.events:
                if isinstance(event, EngineGone):
                    self._agents.gone(event.engine)
                    self._sums.sums.gone(event.engine)
            self._control.feed.note_change()

    def _settle(self) -> None:
        """Ends a batch: events are made safe, messages leave, the next tick is planned."""
        self._flush()
        self._rearm()

    def _gather(self) -> None:
        """Ends a batch of agents' frames: now, or together with others once GATHER_S have passed since the last."""
        left = self._flushed_at + GATHER_S - self._loop.time()
        if left <= 0:
            self._settle()
        elif self._gathering is None:
            self._gathering = self._loop.call_later(left, self._settle)

    def _flush(self) -> None:
        """Commits, sends what may leave, and has the journal synced for the rest. Repeats while sending itself makes
        events: an agent whose queue is full is given up."""
        self._flushed_at = self._loop.time()
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        while True:
            self._commit()
            ready = self._outbox.take(0 if self._journal is None else self._journal.synced)
            if not ready.to_agents and not ready.to_trainer:
                break
            self._trainer.send(ready.to_trainer)
            self._agents.send_all(ready.to_agents)
        if self._disk is not None:
            self._disk.plan(urgent=self._outbox.waits)
        if self._agents.roster.has_news and self._roster_timer is None:
            self._roster_timer = self._loop.call_later(GATHER_NEWS_S, self._send_roster)

    def _flush_now(self) -> None:
        """Flushes, and everything leaves: for greetings and the end, which are rare, this waits for the disk."""
        self._commit()
        if self._journal is not None:
            self._journal.sync()
        self._flush()

    def _commit(self) -> None:
        commits = 0
        if self._journal is not None:
            self._journal.commit(self._ledger.state, self.now())
            commits = self._journal.commits
        gathered, self._gathered = self._gathered, Effects()
        self._outbox.put(commits, gathered)

    def _send_roster(self) -> None:
        self._roster_timer = None
        self._agents.send_roster()
        # An agent whose queue is full was given up.
        self._settle()

    def _rearm(self) -> None:
        """Plans the next tick. A later due time leaves the timer: an early tick does nothing and plans anew."""
        due = self._ledger.next_due()
        if due is None:
            return
        when = due - self._clock_s
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.deliver_and_settle(self._ledger.tick(self.now()))

    async def _finish(self) -> None:
        all_gone = await self._control.await_departures(FINISH_DEADLINE_S)
        log.info("the run is over", all_gone=all_gone)
        if not self._stays:
            self.stop()

    def waits(self) -> list[str]:
        """Who waits for whom, the longest first, as sentences."""
        now = self.now()
        doubles = [
            Wait(f"another process with the proof of {engine}", engine, what="its leave", since=now - tried, until=None)
            for engine, tried in self._agents.waits()
        ]
        waits = sorted((*self._ledger.waits(now), *doubles), key=lambda wait: wait.since)
        return [wait.sentence(now) for wait in waits]

    def complete(self, status: ManagerStatus) -> ManagerStatus:
        return msgspec.structs.replace(
            bounded_status(status),
            trainer_connected=self._trainer.connected,
            delta_bytes=self._agents.delta_bytes,
            fetches=tuple(self._fetches.values()),
        )

    def _bind(self, domain: str, port: int, frame_bytes: int, unfinished_bytes: int | None = None) -> Router:
        host = self._listen.host
        try:
            return Router(
                self._context,
                self._keys,
                domain,
                address=host,
                port=port,
                frame_bytes=frame_bytes,
                unfinished_bytes=unfinished_bytes,
            )
        except zmq.ZMQError as error:
            raise RunFailed(f"the manager cannot bind {host}:{port} for {domain}: {error}") from error

    async def _open_http(self) -> None:
        registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=registry)
        weights, pauses, sums = self._agents.weights, self._pauses, self._sums.outcomes
        refused = self.authenticator.refused
        registry.register(ManagerCollector(self.status, self.traffic, refused, weights, pauses, sums))
        prices = PricingSpec() if self._job is None else self._job.spec.pricing
        registry.register(RunCollector(self.status, self._history, prices))
        self._http, self._metrics, listen = HttpServer(), None, self._listen
        app = self._control.make_app(self._keys.http_token, registry, self._http.keep)
        await self._start_http(self._http, app, listen.http_port, listen.tls)
        if listen.metrics_port is not None:
            self._metrics = HttpServer()
            await self._start_http(self._metrics, make_metrics_app(registry), listen.metrics_port, None)

    async def _start_http(
        self, server: HttpServer, app: web.Application, port: int, tls: ssl.SSLContext | None
    ) -> None:
        host = None if self._listen.host == EVERYWHERE else self._listen.host
        try:
            await server.start(app, host, port, tls=tls, shutdown_s=HTTP_SHUTDOWN_S)
        except OSError as error:
            raise RunFailed(f"the manager cannot bind {self._listen.host}:{port} for HTTP: {error.strerror}") from error

    def _on_broken_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in NO_ROOM and "socket" in context:
            # Strangers have taken all descriptors, each for HANDSHAKE_MS; asyncio listens again in a second.
            log.warning("no connection is accepted for a second", error=str(error))
            return
        if not isinstance(error, PolyRLError):
            log.error("a callback broke", what=context.get("message"), exc_info=error)
            broken = RunFailed(f"the manager broke: {error or context.get('message')}")
            broken.__cause__, error = error, broken
        if not self._ended.done():
            self._ended.set_exception(error)
