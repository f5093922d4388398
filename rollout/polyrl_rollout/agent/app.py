"""The agent: one engine, one link to the manager, and what is between them.

    link        greets with what it holds, as often as it takes; without a manager the engine generates on, bounded
    tokens      leave every delta period, as far as worth it (see `tokens`); a beat when nothing else was said
    weights     pulled while serving; at the switch running sequences stop, those that may use the new version go on
    drain       finish what can be finished, hand back the rest, wait until the manager has everything, Bye, exit 0
    notice      SIGTERM: Leaving; the manager's Drain follows, or the agent drains itself
    fenced      abort and forget everything, greet anew; MAX_FENCED times in a row: exit 1
    cut off     a drill (see `cut`): as if the manager could not be reached, until let back
    engine      broken: hand everything back, Bye, exit 1. Nothing is restarted here: replacing workers is the fleet's

Every wait has its deadline in this file, in `link`, in `generating` or in `puller`. Read next: `tokens`, `draining`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
import zmq

from polyrl.keys import AgentKeys
from polyrl.sample import Pool
from polyrl.wire import (
    Announce,
    Assign,
    Beat,
    Bye,
    Cancel,
    Drain,
    Fenced,
    FromAgent,
    Hello,
    Leaving,
    Resend,
    Returned,
    Serving,
    ToAgent,
    TokensKept,
    WeightsFailed,
    Welcome,
)
from polyrl_rollout.agent.cut import CuttableLink
from polyrl_rollout.agent.draining import Work, plan_drain, reserve_of
from polyrl_rollout.agent.generating import Generation, Listener
from polyrl_rollout.agent.link import HANDSHAKE_S, LinkDown, ManagerAddress
from polyrl_rollout.agent.tokens import TokenBook
from polyrl_rollout.agent.versions import Versions
from polyrl_rollout.engine import NO_VERSION, Engine, EngineFailed, EngineInfo
from polyrl_rollout.puller import Pulled, Puller
from polyrl_rollout.staging import Staging

WELCOME_S: Final = 5.0
"""Longest wait for the answer to Hello."""
ANSWER_S: Final = 10.0
"""A frame of tokens without its TokensKept for this long: the connection is given up and made anew."""
BACKOFF_S: Final = (0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.5, 1.0, 2.0)
"""Pauses between greetings; the last one repeats. A manager that was killed is back within the first three seconds."""
MANAGER_LOST_S: Final = 600.0
"""Without a word of the manager for this long the agent ends: the run is over and nobody told it."""
MAX_FENCED: Final = 3
HEALTH_S: Final = 10.0
"""Pause between questions to an engine that gives no tokens."""
REPLAN_S: Final = 0.25
"""Pause between looks at who can still finish while draining; ends of sequences are acted upon at once."""
DRAIN_ANSWER_S: Final = 2.0
"""After Leaving the manager has this long to say Drain before the agent drains itself."""
CLOSE_S: Final = 15.0
"""Longest wait for the engine to end; the leash takes what is left."""
FAREWELL_S: Final = 1.0
"""Time that the last words get to leave."""

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class AgentSettings:
    """Who this agent is and whom it dials."""

    manager: Callable[[], ManagerAddress | None]
    """Asked before every connection, since a restarted manager listens elsewhere; None: not known yet."""
    keys: AgentKeys
    epoch: int
    engine: str
    pool: Pool
    drain_s: float
    """How long after SIGTERM the agent is ended by force."""


class Agent:
    """`run` once; the value it returns is the process's exit code."""

    def __init__(self, settings: AgentSettings, engine: Engine, info: EngineInfo, staging: Staging) -> None:
        """`info`: what the engine will be like, told until it has started and says so itself."""
        self._settings, self._engine, self._info, self._staging = settings, engine, info, staging
        self._loop = asyncio.get_running_loop()
        self.book = TokenBook()
        listener = Listener(self._tokens_came, self._hand_back, self._engine_broke)
        self._generation = Generation(engine, self.book, listener)
        puller = Puller(settings.keys, staging)
        self._versions = Versions(engine, puller, staging, self._switch, self._tell)
        self._link: CuttableLink | None = None
        self._reachable = asyncio.Event()
        self._reachable.set()
        self._welcome: Welcome | None = None
        self._fresh = asyncio.Event()
        self._quiet = asyncio.Event()
        self._ended: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._heard_at = self._said_at = self._loop.time()
        self._fenced = 0
        self._started = self._switching = False
        self._drain_at: float | None = None
        self._drain_reserve = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until drained, fenced for good, or broken. Returns EXIT_DONE or EXIT_FAILED."""
        with zmq.Context() as context:
            for work in (self._stay_linked(context), self._send_tokens(), self._versions.run(), self._watch_engine()):
                self._spawn(work)
            try:
                code, why = await self._ended
            finally:
                await self._stop()
        log.info("agent ends", engine=self._settings.engine, exit_code=code, reason=why)
        return code

    def notice(self) -> None:
        """The machine is taken away (SIGTERM): `drain_s` seconds are left."""
        log.info("notice", seconds=self._settings.drain_s)
        self._tell(Leaving(self._settings.drain_s, "SIGTERM"))
        patience = min(DRAIN_ANSWER_S, self._settings.drain_s / 2) if self._welcome else 0.0
        self._loop.call_later(patience, self._drain, Drain(self._settings.drain_s - patience, "SIGTERM"))

    def cut_off(self) -> None:
        """A drill: from here on the manager cannot be reached, and does not reach us."""
        log.info("cut off from the manager, for a drill")
        self._reachable.clear()
        if self._link is not None:
            self._link.cut()

    def let_back(self) -> None:
        """The end of that drill."""
        log.info("let back")
        self._reachable.set()
        if self._link is not None:
            with contextlib.suppress(LinkDown):  # then `receive` says so too
                self._link.mend()

    # --- the link -----------------------------------------------------------------------------------------------------

    async def _stay_linked(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        failures = 0
        while True:
            address = self._settings.manager()
            try:
                if address is not None:
                    self._link = await self._dial(context, address)
                    await self._greet(self._link)
                    failures = 0
                    await self._listen(self._link)
            except LinkDown as error:
                log.info("no manager", error=str(error), attempt=failures)
            finally:
                self._unlink()
            if self._loop.time() - self._heard_at > MANAGER_LOST_S:
                self._end(EXIT_FAILED, f"the manager was silent for {MANAGER_LOST_S:.0f} s")
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    async def _dial(self, context: zmq.Context[zmq.Socket[bytes]], address: ManagerAddress) -> CuttableLink:
        """Raises LinkDown."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._reachable.wait()
        except TimeoutError:
            raise LinkDown("cut off from the manager, for a drill") from None
        return await CuttableLink.open(context, address, self._settings.keys, self._settings.engine)

    async def _greet(self, link: CuttableLink) -> None:
        """Raises LinkDown when the manager does not welcome us."""
        link.send(self._hello())
        try:
            async with asyncio.timeout(WELCOME_S):
                answer = await link.receive()
                while not isinstance(answer, Welcome | Fenced):
                    answer = await link.receive()
        except TimeoutError:
            raise LinkDown("the manager does not answer the greeting") from None
        self._heard_at = self._loop.time()
        if isinstance(answer, Fenced):
            await self._be_fenced(answer)
        else:
            self._enter(answer)

    async def _listen(self, link: CuttableLink) -> None:
        while True:
            message = await link.receive()
            self._heard_at = self._loop.time()
            if isinstance(message, Fenced):
                await self._be_fenced(message)
            self._obey(message)

    def _enter(self, welcome: Welcome) -> None:
        self._welcome, self._fenced = welcome, 0
        self.book.reconnect(self._loop.time())
        self._fresh.set()

    async def _be_fenced(self, message: Fenced) -> None:
        """Nothing that runs here counts any more. Raises LinkDown: the next connection greets anew."""
        self._fenced += 1
        if self._fenced >= MAX_FENCED:
            self._end(EXIT_FAILED, f"fenced: {message.reason}")
        await self._generation.stop_all()
        for number in tuple(self.book.streams):
            self.book.forget(number)
        self._generation.look_for_room()
        raise LinkDown(f"fenced: {message.reason}")

    def _unlink(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = self._welcome = None

    def _hello(self) -> Hello:
        info, settings = self._info, self._settings
        room = (info.max_running, info.kv_tokens, info.max_context)
        return Hello(settings.epoch, settings.engine, settings.pool, *room, self._engine.version, self.book.held())

    def _tell(self, message: FromAgent) -> None:
        """Says it now or never: what matters of it is said again by the next greeting."""
        if self._link is None or (self._welcome is None and not isinstance(message, Hello)):
            return
        try:
            self._link.send(message)
        except LinkDown:
            return
        self._said_at = self._loop.time()

    # --- what the manager says ----------------------------------------------------------------------------------------

    def _obey(self, message: ToAgent) -> None:
        match message:
            case Assign():
                self._assign(message)
            case TokensKept(seq):
                self.book.keep(seq)
                self._generation.look_for_room()
                self._quiet.set()
            case Resend(assignment, offset):
                self.book.resend(assignment, offset, self._loop.time())
                self._fresh.set()
            case Cancel(assignment):
                self.book.forget(assignment)
                self._spawn(self._generation.stop([assignment]))
            case Announce():
                self._versions.announce(message)
            case Drain():
                self._drain(message)
            case Welcome():
                self._enter(message)

    def _assign(self, assign: Assign) -> None:
        reason = self._objection(assign)
        if reason is not None:
            self._tell(Returned(assign.assignment, *reason))
            return
        stream = self.book.open(assign, self._loop.time())
        if stream is not None:
            self._generation.start(stream)

    def _objection(self, assign: Assign) -> tuple[str, str] | None:
        version = self._engine.version
        if self._drain_at is not None:
            return "draining", "the engine drains"
        if self._switching or not assign.min_version <= version <= assign.max_version:
            return "versionChanged", f"the engine serves version {version}"
        if assign.max_new_tokens < 1:
            return "rejected", "its token budget is used up"
        return None

    # --- tokens out ---------------------------------------------------------------------------------------------------

    def _tokens_came(self) -> None:
        self._fresh.set()
        self._quiet.set()

    async def _send_tokens(self) -> None:
        """One frame per delta period while there are tokens; a beat when there was nothing to say."""
        while True:
            welcome = self._welcome
            beat_s = welcome.beat_s if welcome else WELCOME_S
            try:
                async with asyncio.timeout_at(self._said_at + beat_s):
                    await self._fresh.wait()
            except TimeoutError:
                self._said_at = self._loop.time()
                self._tell(self._beat())
                continue
            await asyncio.sleep(welcome.delta_s if welcome else BACKOFF_S[0])
            if self._welcome is not None:
                self._fresh.clear()
                self._flush(everything=False)
                if self.book.has_unsent():
                    self._fresh.set()

    def _flush(self, *, everything: bool) -> None:
        if self._link is None or self._welcome is None:
            return
        now = self._loop.time()
        for frame in self.book.pack(now, self._welcome.delta_s, flush=everything):
            self._tell(frame)
        oldest = self.book.oldest_unanswered()
        if oldest is not None and now - oldest > ANSWER_S:
            self._link.fail(f"the manager did not confirm tokens for {ANSWER_S:.0f} s")

    def _beat(self) -> Beat:
        used = sum(len(s.assign.input_ids) // 4 + len(s.ids) for s in self.book.unfinished())
        running = len(self._generation)
        return Beat(min(running, self._info.max_running), max(0, running - self._info.max_running),
                    max(0, self._info.kv_tokens - used))  # fmt: skip

    def _hand_back(self, assignment: int, reason: str, detail: str = "") -> None:
        """Tokens first, then the assignment."""
        self._flush(everything=True)
        if self.book.forget(assignment) is not None:
            self._tell(Returned(assignment, reason, detail))
        self._quiet.set()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _switch(self, pulled: Pulled) -> bool:
        """Stops what runs, loads, and lets those go on that may. False: the old version serves on."""
        begun, version = self._loop.time(), pulled.staged.version
        self._switching = True
        await self._generation.stop_all()
        self._flush(everything=True)
        try:
            changed = await self._load(pulled)
        except EngineFailed as error:
            log.warning("weights not loaded", version=version, error=str(error))
            self._tell(WeightsFailed(version, self._engine.version, str(error)))
            if self._engine.version == NO_VERSION:
                self._engine_broke(str(error))
            else:
                await self._check_engine()
            return False
        else:
            if changed:
                self._tell(self._hello())
            seconds = self._loop.time() - begun
            self._tell(Serving(version, pulled.seconds, seconds, pulled.bytes_pulled))
            log.info("serving", version=version, pull_s=round(pulled.seconds, 3), load_s=round(seconds, 3))
            return True
        finally:
            self._switching = False
            self._go_on()

    async def _load(self, pulled: Pulled) -> bool:
        """True when the engine turned out to be another than was told so far. Raises EngineFailed."""
        told = self._info
        if not self._started:
            self._info = await self._engine.start(pulled.staged.folder)
            self._started = True
        await self._engine.load_weights(pulled.staged.version, pulled.staged.folder)
        return self._info != told

    def _go_on(self) -> None:
        for stream in self.book.unfinished():
            if stream.assign.max_version < self._engine.version:
                self._hand_back(stream.assign.assignment, "versionChanged")
            else:
                self._generation.start(stream)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _drain(self, drain: Drain) -> None:
        """The earlier deadline wins."""
        at = self._loop.time() + max(0.0, drain.deadline_s)
        if self._drain_at is not None:
            self._drain_at = min(self._drain_at, at)
            return
        log.info("draining", seconds=drain.deadline_s, reason=drain.reason)
        self._drain_at, self._drain_reserve = at, reserve_of(drain.deadline_s)
        self._spawn(self._run_drain(drain.reason))

    async def _run_drain(self, reason: str) -> None:
        while self.book.unfinished() and self._drain_left() > 0:
            await self._hand_back_hopeless()
            await self._wait_for_quiet(min(REPLAN_S, max(0.0, self._drain_left())))
        await self._return_drained([stream.assign.assignment for stream in self.book.unfinished()])
        self._flush(everything=True)
        while self.book.streams and self._link is not None and self._drain_left() + self._drain_reserve / 2 > 0:
            await self._wait_for_quiet(REPLAN_S)
        self._tell(Bye(reason))
        self._end(EXIT_DONE, f"drained: {reason}")

    async def _hand_back_hopeless(self) -> None:
        work = [Work(s.assign.assignment, s.remaining, s.tokens_per_second) for s in self.book.unfinished()]
        await self._return_drained(plan_drain(work, self._drain_left()).hand_back)

    async def _return_drained(self, assignments: Sequence[int]) -> None:
        await self._generation.stop(assignments)
        for assignment in assignments:
            self._hand_back(assignment, "draining")

    def _drain_left(self) -> float:
        """Seconds in which engines may still generate."""
        assert self._drain_at is not None
        return self._drain_at - self._drain_reserve - self._loop.time()

    async def _wait_for_quiet(self, seconds: float) -> None:
        self._quiet.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            return

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
            self._engine_broke(str(error))

    def _engine_broke(self, why: str) -> None:
        for stream in self.book.unfinished():
            self._hand_back(stream.assign.assignment, "engineError", why)
        self._flush(everything=True)
        self._tell(Bye(f"engine failed: {why}"))
        self._end(EXIT_FAILED, f"the engine failed: {why}")

    def _end(self, code: int, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result((code, why))

    async def _stop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(FAREWELL_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._generation.stop_all()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._engine.close()
        except TimeoutError:
            log.warning("the engine does not end; the leash takes it", seconds=CLOSE_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a part of the agent broke", exc_info=error)
            self._end(EXIT_FAILED, f"a part of the agent broke: {error}")
