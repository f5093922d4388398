"""One run on this machine, from the first process to the last: observe, plan, act, until the planner says the end.

    fleet (exits) ─┐
    manager's status (long-poll) ─┼─> wake ─> observe ─> plan ─> start / stop / fault ─> wait for the next event
    signals, end of a back-off ─┘

It wakes on events only; the one timer is the back-off that the planner names. Whatever happens, `run` returns with no
process left. Which worker to start or replace is the planner's decision; files and exit codes are `run`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import Final

from polyrl.errors import UserError
from polyrl.history.fleet import FAULT, RECLAIMED
from polyrl.local import planner
from polyrl.local.planner import ObservedWorker, PlannedAction, RunEnd, RunObservation, StartWorker, StopWorker
from polyrl.local.starts import how_it_ended, was_killed
from polyrl.status import EngineState, ManagerStatus
from polyrl.worker import Role, Workers
from polyrl_cli.chaos.faults import Fault, FaultRequest, choose_victim
from polyrl_cli.local.chaos import DueFault, FaultInjector, FaultSchedule
from polyrl_cli.local.manager import LocalManager
from polyrl_cli.local.process_fleet import ProcessFleet
from polyrl_cli.report.timeline import Timeline
from polyrl_operator.secret import renew_run_certificate, write_engine_keys

LONGEST_SLEEP_S: Final = 30.0
"""Between two turns of the loop when nothing happens at all; every change wakes it anyway."""

LAST_GRACE_S: Final = 5.0
"""What workers get once the trainer has ended; by then none holds anything that matters."""

CERTIFICATE_CHECK_S: Final = 60.0
"""Between two questions whether the manager's certificate is to be renewed; not one sleep of days, which a laptop that
is closed would lengthen."""

ENGINES: Final = (Role.ROLLOUT, Role.RESERVED)

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LocalRun:
    """One run: its wanted workers, its fleet, and what is known of it at this moment."""

    def __init__(
        self, wanted: Workers, fleet: ProcessFleet, client: LocalManager, timeline: Timeline, keys: Path
    ) -> None:
        self.status = ManagerStatus(seq=-1, run_epoch=0)
        self.observed: list[ObservedWorker] = []
        self.conditions: list[str] = []
        self.stopped_by: signal.Signals | None = None
        self._wanted, self._fleet, self._client, self._timeline, self._keys = wanted, fleet, client, timeline, keys
        self._injector = FaultInjector(fleet)
        self._manager_ready = False
        self._served: set[str] = set()
        self._heard: set[str] = set()
        self._departed: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[bool]] = set()

    async def run(self, schedule: FaultSchedule) -> RunEnd:
        """Returns when the planner says the end and every process is gone. Signals are taken until the loop is closed,
        so that none comes between the end and its summary."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if self._wanted.manager is not None:
            self._watcher = asyncio.create_task(self._watch_manager())
            self._watcher.add_done_callback(lambda _: self._wake.set())
        renewals = asyncio.create_task(self._renew_certificate())
        try:
            end = await self._reconcile(schedule)
            await self._injector.close()
            await self._stop_rest()
            return end
        finally:
            renewals.cancel()
            if self._watcher is not None:
                self._watcher.cancel()
                await asyncio.gather(self._watcher, *self._reports, return_exceptions=True)
            await self._injector.close()
            await self._fleet.close()

    async def inject_fault(self, request: FaultRequest) -> str:
        """Finds a victim and begins the fault; returns what it is. Raises UserError when nothing can be hit."""
        fault = choose_victim(request, self.observed, {engine.name for engine in self.status.engines})
        await self._inject(fault, f"chaos: {fault}")
        return str(fault)

    async def _reconcile(self, schedule: FaultSchedule) -> RunEnd:
        while True:
            observation = await self._observe()
            for action in planner.plan(self._wanted, observation, self._fleet.now()):
                if isinstance(action, RunEnd):
                    return action
                await self._act(action)
            due = schedule.due(self.status, self.observed)
            if due is not None:
                await self._inject_due(due)
            await self._next_event(observation)
            if self._watcher is not None and self._watcher.done():
                self._watcher.result()  # a refusal of the manager to its own runner ends the run

    async def _observe(self) -> RunObservation:
        before = {seen.name: seen for seen in self.observed}
        self.observed = await self._fleet.list()
        for seen in self.observed:
            self._note_exit(before.get(seen.name), seen)
        observation = RunObservation(
            self.observed,
            self._manager_ready,
            served=frozenset(self._served),
            heard=frozenset(self._heard),
            stopping=self.stopped_by is not None,
            finishing=self.status.finished,
            succeeded=self.status.finished and self.status.ok,
        )
        sentences = planner.run_conditions(self._wanted, observation, self._fleet.now())
        for sentence in sentences:
            if sentence not in self.conditions:
                self._timeline.note("condition", "", sentence)
        if not (observation.stopping or observation.finishing):  # else they stay what a run ended with
            for sentence in set(self.conditions) - set(sentences):
                self._timeline.note_over(sentence)
        self.conditions = sentences
        return observation

    def _note_exit(self, before: ObservedWorker | None, seen: ObservedWorker) -> None:
        if seen.lives or (before is not None and not before.lives):
            return
        if seen.reclaim is not None:
            text = f"{seen.name} is gone"
        elif self.status.finished or self.stopped_by is not None:
            text = f"{seen.name} has ended"
        else:
            text = f"{seen.name} has ended with exit code {seen.exit_code}"
        over = self.status.finished or self.stopped_by is not None
        code = seen.exit_code or 0
        if seen.role in planner.ENGINE_ROLES and seen.reclaim is None and not over and was_killed(code):
            # Nobody of ours took it: the kernel, a person or the machine did, which costs the run the same.
            self._timeline.note(RECLAIMED, seen.name, f"{seen.name} {how_it_ended(code)}")
        self._timeline.note("exited", seen.name, text)
        if seen.role in planner.ENGINE_ROLES and self._manager_ready and not self.status.finished:
            self._report_loss(seen.name)

    def _report_loss(self, engine: str) -> None:
        """Reports to the manager what it would learn from the engine's silence only a lease later."""
        report = asyncio.create_task(self._client.drain(engine, 0.0, "its process has ended"))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _act(self, action: PlannedAction) -> None:
        if isinstance(action, StartWorker):
            self._timeline.note("started", action.worker.name, str(action))
            if action.worker.role in ENGINES:
                with contextlib.suppress(OSError):  # a full disk: the engine says that it has none, and is followed
                    write_engine_keys(self._keys, action.worker.name)
            await self._fleet.start(action.worker)
        elif isinstance(action, StopWorker):
            phases = {seen.name: seen.phase for seen in self.observed}
            if phases[action.name] is not planner.WorkerPhase.STOPPING:
                self._timeline.note("stopped", action.name, str(action))
            await self._fleet.stop(action.name, action.grace_s)

    async def _inject_due(self, due: DueFault) -> None:
        try:
            await self._inject(due.fault, str(due))
        except UserError as error:
            self._timeline.note("condition", due.fault.victim, f"{due}: not done: {error}")

    async def _inject(self, fault: Fault, text: str) -> None:
        self._injector.check(fault)
        self._timeline.note(RECLAIMED if fault.takes_capacity else FAULT, fault.victim, text)
        await self._injector.inject(fault)

    async def _next_event(self, observation: RunObservation) -> None:
        now = self._fleet.now()
        due = planner.next_deadline(self._wanted, observation, now)
        wait_s = LONGEST_SLEEP_S if due is None else min(LONGEST_SLEEP_S, max(0.0, due - now))
        waits = {asyncio.ensure_future(self._fleet.changed(wait_s)), asyncio.ensure_future(self._wake.wait())}
        await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._wake.clear()

    async def _renew_certificate(self) -> None:
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_S)
            with contextlib.suppress(OSError):  # a full disk: days are left
                renew_run_certificate(self._keys, time.time())

    async def _watch_manager(self) -> None:
        async with self._client:
            await self._client.find()
            self._manager_ready = True
            self._wake.set()
            async for status in self._client.watch():
                self._take(status)

    def _take(self, status: ManagerStatus) -> None:
        serving = {engine.name for engine in status.engines if engine.state is EngineState.SERVING}
        for name in sorted(serving - self._served):
            self._timeline.note("serving", name, f"{name} serves")
        self._served |= serving
        self._heard |= {engine.name for engine in status.engines}
        for engine in status.engines:
            if engine.departed and engine.departed != self._departed.get(engine.name):
                self._departed[engine.name] = engine.departed
                text = f"the tokens of {engine.name} are not the policy's, {engine.departed}"
                self._timeline.note("condition", engine.name, text)
        self.status = status
        self._timeline.note_fleet(status)
        self._wake.set()

    def _on_signal(self, number: signal.Signals) -> None:
        self.stopped_by = self.stopped_by or signal.Signals(number)
        self._fleet.fork_no_more()
        self._wake.set()

    async def _stop_rest(self) -> None:
        """After the trainer's end the others end by themselves; the grace is for those that don't."""
        deadline = self._fleet.now() + LAST_GRACE_S
        for seen in await self._fleet.list():
            if seen.lives:
                await self._fleet.stop(seen.name, LAST_GRACE_S)
        while any(seen.lives for seen in await self._fleet.list()) and self._fleet.now() < deadline:
            await self._fleet.changed(max(0.0, deadline - self._fleet.now()))
        self.observed = await self._fleet.list()
