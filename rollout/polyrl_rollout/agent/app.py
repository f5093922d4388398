"""The agent: one engine, one link to the manager, and what is between them.

weights     pulled while serving, from other agents too and for them; at the switch running sequences stop, unless the
            engine keeps them, and those that may use the new version go on
drain       generate on while there is time, hand back the rest, wait until the manager has everything, Deregister,
            exit 0
notice      SIGTERM, or the cloud's metadata: Leaving; the manager's StartDrain follows, or the agent drains itself
sleep       where the learner needs the device: hand everything back, give its memory back, pull on; load at the waking
broken      the engine, or a part of the agent: hand everything back, Deregister, exit 1. Nothing is restarted here: the
            fleet replaces workers
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import structlog
import zmq

from polyrl import wire
from polyrl.ledger.scheduling.notice import reserve_of
from polyrl.wire import HandBackReason
from polyrl.worker import TEMPORARY_EXIT
from polyrl_rollout.agent.conversation import AgentSettings, Conversation
from polyrl_rollout.agent.generating import Generation
from polyrl_rollout.agent.idle_trials import IdleTrials
from polyrl_rollout.agent.protocol import AgentProtocol
from polyrl_rollout.agent.rest import RestOrders, Sleeper
from polyrl_rollout.agent.stop_strings import read_tokenizer
from polyrl_rollout.engines.port import NO_VERSION, EngineFailed, EngineLost, InferenceEngine, LoadSeconds
from polyrl_rollout.engines.trial import Trial, try_engine
from polyrl_rollout.weights.lent import LoanReader
from polyrl_rollout.weights.peers.swarm import Swarm
from polyrl_rollout.weights.puller import Pulled, Puller
from polyrl_rollout.weights.staging import Staging
from polyrl_rollout.weights.versions import Versions

TOKENS_KEPT_WAIT_S: Final = 10.0
"""A frame of tokens without its TokensKept for this long: the connection is given up and made anew."""
UNHEARD_S: Final = 0.1
"""Pause between two tries to send while there is no manager to send to."""
HEALTH_S: Final = 10.0
"""Pause between health checks of an engine that gives no tokens."""
REPLAN_S: Final = 0.25
"""Longest pause between two checks of what is left while draining; the end of a sequence ends it at once."""
START_DRAIN_WAIT_S: Final = 2.0
"""After Leaving the manager has this long to send StartDrain before the agent drains itself."""
NEWER_S: Final = 5.0
"""An engine that wakes waits so long for a version that is on its way: loading the one before would be for nothing."""
CLOSE_S: Final = 15.0
"""Longest wait for the engine to end; its parent death signal ends what is left."""
EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1

log = structlog.get_logger(__name__)


class Agent:
    """`run` once; the value it returns is the process's exit code."""

    def __init__(
        self,
        settings: AgentSettings,
        engine: InferenceEngine,
        capacity: wire.EngineCapacity,
        staging: Staging,
        swarm: Swarm | None = None,
    ) -> None:
        """`capacity`: the expected one, announced until it has started and its own is known. `swarm`: other agents that
        weights are taken from, and given to."""
        self._settings, self._engine, self._capacity, self._staging = settings, engine, capacity, staging
        self._swarm = swarm
        self._loop = asyncio.get_running_loop()
        self._protocol = AgentProtocol()
        self.book = self._protocol.book
        self._generation = Generation(engine, self.book, self, seed=settings.seed)
        self.manager = Conversation(settings, self._protocol, self)
        self._send = self.manager.send
        reader = None if settings.rdma_devices is None else LoanReader(settings.rdma_devices)
        puller = Puller(settings.keys, staging, swarm=swarm, reader=reader, run_epoch=settings.run_epoch)
        self._versions = Versions(engine, puller, staging, self._switch, self._send, self.engine_failed)
        self._rest = RestOrders(engine.sleeps)
        self._sleeper = Sleeper(
            self._rest,
            sleep=self._fall_asleep,
            begin_waking=lambda: self.spawn(self._wake()),
            confirm_awake=self._confirm_awake,
        )
        self._idle_trials = IdleTrials(self._idle_since, self._try_engine, report=self._note_trial)
        self._changing = asyncio.Lock()
        """Held by who changes the engine's weights or memory."""
        self._newest: Pulled | None = None
        """What it serves, or will when it wakes."""
        self._unsent = asyncio.Event()
        self._progress = asyncio.Event()
        self._ended: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._started = self._switching = False
        self._ends_at: float | None = None
        """When the machine is taken away, by the notice that ends first; every greeting repeats it."""
        self._ends_for = ""
        self._drain_at: float | None = None
        self._drain_reserve = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until drained, fenced for good, or broken. Returns EXIT_DONE, EXIT_FAILED or TEMPORARY_EXIT."""
        with zmq.Context() as context:
            works = (self._send_tokens(), self._send_heartbeats(), self._versions.run(), self._watch_engine())
            for work in (self.manager.run(context), *works, self._sleeper.run(), self._idle_trials.run()):
                self.spawn(work)
            try:
                code, why = await self._ended
            finally:
                await self._stop()
        log.info("agent ends", engine=self._settings.engine, exit_code=code, reason=why)
        return code

    def notice(self, seconds: float | None = None, reason: str = "SIGTERM") -> None:
        """The machine is taken away within `seconds`; None: within `drain_s`, as after SIGTERM. Of several notices the
        one that ends first counts."""
        seconds = self._settings.drain_s if seconds is None else seconds
        log.info("notice", seconds=seconds, reason=reason)
        if self._ends_at is None or self._loop.time() + seconds < self._ends_at:
            self._ends_at, self._ends_for = self._loop.time() + seconds, reason
        self._send(wire.Leaving(seconds, reason))
        answer_s = min(START_DRAIN_WAIT_S, seconds / 2) if self._protocol.welcome else 0.0
        self._loop.call_later(answer_s, self._drain, wire.StartDrain(seconds - answer_s, reason))

    # --- messages of the manager --------------------------------------------------------------------------------------

    def hello(self) -> wire.Hello:
        versions, receipts = self.book.versions(), self._versions.receipts
        return wire.Hello(
            self._settings.run_epoch,
            self._settings.engine,
            pool=self._settings.pool,
            **msgspec.structs.asdict(self._capacity),
            weight_version=self._versions.shown,
            held=self.book.held(),
            versions=versions,
            leaving_s=None if self._ends_at is None else max(0.0, self._ends_at - self._loop.time()),
            leaving_reason=self._ends_for,
            seq=self.book.seq,
            receipts={one: receipts[one] for one in (self._engine.version, *versions) if one in receipts},
            peer_key=self._swarm.public_key if self._swarm else b"",
            peer_port=self._swarm.port if self._swarm else 0,
            sleeps=self._rest.able,
            asleep=self._rest.asleep,
            sum=self._versions.sums.get(self._engine.version),
        )

    async def reset(self) -> None:
        await self._generation.stop_all()
        self._generation.update_room()

    def handle(self, message: wire.ToAgent) -> None:
        match message:
            case wire.Assign():
                self._assign(message)
            case wire.TokensKept():
                self._generation.update_room()
                self._progress.set()
            case wire.Welcome():
                self._rest.welcomed()
                self._unsent.set()
                for undelivered in self._protocol.undelivered():
                    self.hand_back(undelivered.assignment, HandBackReason(undelivered.reason), undelivered.detail)
            case wire.Resend():
                self._unsent.set()
            case wire.Cancel(assignment):
                self.spawn(self._generation.stop([assignment]))
            case wire.Recall(assignment):
                self.spawn(self._give_back([assignment], HandBackReason.RECALLED))
            case _:
                self._handle_rest(message)

    def _handle_rest(self, message: wire.ToAgent) -> None:
        """What concerns the engine, and no sequence."""
        match message:
            case wire.Announce():
                self._versions.announce(message.weights)
            case wire.Peers() if self._swarm is not None:
                self._swarm.update(message)
            case wire.GoToSleep() | wire.WakeUp():
                self._sleeper.order(message)
            case wire.StartDrain():
                self._drain(message)

    def _assign(self, assign: wire.Assign) -> None:
        accepted = self._protocol.accept(assign, self._engine.version, switching=self._switching)
        if isinstance(accepted, wire.HandBack | wire.PrefixUnknown):
            self._send(accepted)
        elif accepted is not None:
            self._idle_trials.cancel()
            self._generation.start(accepted)

    # --- tokens out ---------------------------------------------------------------------------------------------------

    def on_tokens(self) -> None:
        self._unsent.set()
        self._progress.set()

    async def _send_tokens(self) -> None:
        """One frame per delta period while there are tokens."""
        while True:
            await self._unsent.wait()
            welcome = self._protocol.welcome
            await asyncio.sleep(welcome.delta_s if welcome else UNHEARD_S)
            if self._protocol.welcome is not None:
                self._unsent.clear()
                self._flush(everything=False)
                if self.book.has_unsent():
                    self._unsent.set()

    async def _send_heartbeats(self) -> None:
        """Also while tokens flow: nothing else says how much KV room is free."""
        while True:
            welcome, begun = self._protocol.welcome, self._loop.time()
            await asyncio.sleep(welcome.beat_s if welcome else UNHEARD_S)
            if self._rest.able:
                self.manager.doubt_lease(self._loop.time() - begun)
            self._send(self._heartbeat())

    def _flush(self, *, everything: bool) -> None:
        link, welcome = self.manager.link, self._protocol.welcome
        if link is None or welcome is None:
            return
        now = self._loop.time()
        for frame in self.book.pack(now, welcome.delta_s, flush=everything):
            self._send(frame)
        oldest = self.book.oldest_unanswered()
        if oldest is not None and now - oldest > TOKENS_KEPT_WAIT_S:
            link.fail(f"the manager did not confirm tokens for {TOKENS_KEPT_WAIT_S:.0f} s")

    def _heartbeat(self) -> wire.Heartbeat:
        running = len(self._generation)
        return wire.Heartbeat(
            running=min(running, self._capacity.max_running),
            queued=max(0, running - self._capacity.max_running),
            kv_free_tokens=max(0, self._capacity.kv_tokens - self.book.text_tokens()),
            newest=self.book.newest,
        )

    def hand_back(self, assignment: int, reason: HandBackReason, detail: str = "") -> None:
        """Tokens first, then the assignment; while nobody listens both are kept for the manager's next Welcome."""
        self._flush(everything=True)
        message = self._protocol.hand_back(assignment, reason, detail)
        if message is not None:
            self._send(message)
        self._progress.set()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _switch(self, pulled: Pulled) -> str:
        """As `_change_to`; an engine that sleeps loads it when it wakes."""
        async with self._changing:
            if self._rest.asleep:
                self._newest = pulled
                return ""
            return await self._change_to(pulled)

    async def _change_to(self, pulled: Pulled) -> str:
        """Stops what may not run on, loads, and lets those go on that may. Returns why the old version serves on, if it
        does."""
        begun, version = self._loop.time(), pulled.staged.version
        self._switching = True
        await self._stop_before(version)
        self._flush(everything=True)
        stopped_s = self._loop.time() - begun
        announced = self._capacity
        try:
            seconds = await self._load(pulled)
        except EngineFailed as error:
            log.warning("weights not loaded", version=version, error=str(error))
            self._send(wire.WeightsFailed(version, self._engine.version, reason=str(error)))
            if self._engine.version == NO_VERSION:
                self.engine_failed(error)
            else:
                await self._check_engine()
            return str(error)
        else:
            self._newest, self._versions.sums = pulled, {version: seconds.sum}
            if self._capacity != announced:
                self._send(self.hello())
            if not self._versions.is_tried:
                self._versions.note_trial(await self._try_engine(0))
            self._versions.send_loaded(pulled, replace(seconds, wait=seconds.wait + stopped_s))
            return ""
        finally:
            self._switching = False
            self._continue()

    async def _stop_before(self, version: int) -> None:
        """Stops what does not run on through a switch to `version`: all, unless the engine keeps requests; then what
        may not use it, and what has not begun and is to read its prompt with the new weights."""
        await self._idle_trials.stop()
        # While there is no room streams are not read, and an engine may merge tokens of two versions.
        if not self._engine.keeps or not self.book.has_room():
            await self._generation.stop_all()
            return
        for_good = (stream for stream in self.book.unfinished() if stream.assign.max_version < version)
        afresh = (stream for stream in self.book.unfinished() if not self._generation.has_begun(stream))
        await self._generation.stop({stream.assign.assignment for stream in (*for_good, *afresh)})

    async def _try_engine(self, number: int) -> Trial:
        assert self._newest is not None, "only what has weights is tried"
        return await try_engine(self._engine, self._newest.staged.folder, self._capacity.max_context, number)

    def _idle_since(self) -> float | None:
        busy = self._switching or self._protocol.draining or self._rest.asleep or len(self._generation) > 0
        if busy or not (self._settings.tries_idle and self._versions.is_tried):
            return None
        return self._generation.tokens_at

    def _note_trial(self, trial: Trial) -> None:
        self._versions.note_trial(trial)
        self._versions.confirm()

    async def _load(self, pulled: Pulled) -> LoadSeconds:
        """Loads the version; the seconds are of the load alone. The first one starts the engine, too, whose capacity
        may turn out to be another than was announced so far. Raises EngineFailed."""
        if not self._started:
            self._capacity = await self._engine.start(pulled.staged.folder)
            self._started = True
        elif self._rest.able and self._engine.version == NO_VERSION:
            return await self._engine.wake(pulled.staged.version, pulled.staged.folder)
        if self._generation.decode is None:
            self._generation.decode = await asyncio.to_thread(read_tokenizer, pulled.staged.folder)
        return await self._engine.load_weights(pulled.staged.version, pulled.staged.folder)

    def _continue(self) -> None:
        for stream in self.book.unfinished():
            if stream.leaves:
                continue  # a Recall that came during the switch: it is being handed back
            if stream.assign.max_version < self._engine.version:
                self.hand_back(stream.assign.assignment, HandBackReason.VERSION_CHANGED)
            elif not self._generation.is_running(stream):
                self._generation.start(stream)

    # --- sleep --------------------------------------------------------------------------------------------------------

    async def _fall_asleep(self, order: wire.GoToSleep) -> None:
        """The agent ends with an engine that does not: only its end is sure to free the memory."""
        begun = self._loop.time()
        try:
            async with asyncio.timeout(order.deadline_s), self._changing:
                if self._started and not self._rest.asleep:  # one that awaits its first weights holds nothing
                    rest = [stream.assign.assignment for stream in self.book.unfinished()]
                    await self._give_back(rest, HandBackReason.RECALLED)
                    await self._engine.sleep()
                self._rest.asleep = True
        except TimeoutError:
            await self._end_awake(EngineLost(f"it did not sleep within {order.deadline_s:g} s"))
        except EngineFailed as error:
            await self._end_awake(error)
        else:
            seconds = self._loop.time() - begun
            log.info("asleep", seconds=round(seconds, 3))
            self._send(wire.Asleep(seconds, order.order))

    async def _end_awake(self, error: EngineFailed) -> None:
        """The manager hears of it when the memory is free."""
        await self._close_engine()
        self.engine_failed(error)

    async def _wake(self) -> None:
        """With the newest weights that are here; without any the first ones start it."""
        begun = self._loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWER_S):
                await self._versions.settled()
        async with self._changing:
            if not (self._rest.asleep and self._rest.is_wanted and self._protocol.welcome):
                return
            self._rest.asleep = False
            if self._newest is not None:
                await self._change_to(self._newest)
                log.info("awake", seconds=round(self._loop.time() - begun, 3), version=self._engine.version)

    def _confirm_awake(self) -> None:
        """Unless it loads just now, and will say so."""
        if self._engine.version != NO_VERSION and not self._switching:
            self._versions.confirm()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _drain(self, drain: wire.StartDrain) -> None:
        """The earlier deadline wins."""
        at = self._loop.time() + max(0.0, drain.deadline_s)
        if self._drain_at is not None:
            self._drain_at = min(self._drain_at, at)
            return
        log.info("draining", seconds=drain.deadline_s, reason=drain.reason)
        self._protocol.draining = True
        self._drain_at, self._drain_reserve = at, reserve_of(drain.deadline_s)
        self.spawn(self._run_drain(drain.reason))

    async def _run_drain(self, reason: str) -> None:
        """Generates on while there is time: which samples go on elsewhere, and when, the manager decides."""
        while self.book.unfinished() and self._drain_left() > 0:
            await self._wait_for_progress(min(REPLAN_S, max(0.0, self._drain_left())))
        rest = [stream.assign.assignment for stream in self.book.unfinished()]
        await self._give_back(rest, HandBackReason.DRAINING)
        # Also without a link: a manager that starts again is back in seconds, and wants what is held here.
        while self.book.streams and self._drain_left() + self._drain_reserve / 2 > 0:
            self._flush(everything=True)
            await self._wait_for_progress(REPLAN_S)
        self._send(wire.Deregister(reason))
        self._end(EXIT_DONE, f"drained: {reason}")

    async def _give_back(self, assignments: Sequence[int], reason: HandBackReason) -> None:
        """Stops these and hands them back; one that ends by itself meanwhile is not handed back."""
        for assignment in assignments:
            self.book.leave(assignment)
        await self._generation.stop(assignments)
        for assignment in assignments:
            if self.book.is_unfinished(assignment):
                self.hand_back(assignment, reason)

    def _drain_left(self) -> float:
        """Seconds in which engines may still generate."""
        assert self._drain_at is not None
        return self._drain_at - self._drain_reserve - self._loop.time()

    async def _wait_for_progress(self, seconds: float) -> None:
        self._progress.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._progress.wait()

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            if not self._started or self._switching or self._loop.time() - self._generation.tokens_at < HEALTH_S:
                continue
            await self._check_engine()

    async def _check_engine(self) -> None:
        try:
            await self._engine.health()
        except EngineFailed as error:
            self.engine_failed(error)

    def engine_failed(self, error: EngineFailed) -> None:
        # Who started this agent gives up settings that fail again and again, not engines that somebody kills.
        code = TEMPORARY_EXIT if isinstance(error, EngineLost) else EXIT_FAILED
        self._break_off(code, f"the engine failed: {error}")

    def _break_off(self, code: int, why: str) -> None:
        """Hands everything back and ends, whatever of it still works."""
        try:
            for stream in self.book.unfinished():
                self.hand_back(stream.assign.assignment, HandBackReason.ENGINE_ERROR, why)
            self._flush(everything=True)
            self._send(wire.Deregister(why))
        finally:
            self._end(code, why)

    def give_up(self, why: str) -> None:
        self._end(EXIT_FAILED, why)

    def _end(self, code: int, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result((code, why))

    async def _stop(self) -> None:
        self.manager.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._generation.stop_all()
        await self._close_engine()

    async def _close_engine(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._engine.close()
        except TimeoutError:
            log.warning("the engine does not end; its parent death signal will end it", seconds=CLOSE_S)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` beside the agent for as long as it lives, and ends the agent when it breaks."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a part of the agent broke", exc_info=error)
            self._break_off(EXIT_FAILED, f"a part of the agent broke: {error}")
