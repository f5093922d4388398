"""Runs a schedule to its end, and makes a failing one smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from polyrl.errors import PolyRLError
from polyrl.ledger.state import Counters, LedgerState
from polyrl.wire import Accepted, Batch
from polyrl_rollout.testing.simulation.engine import SimulatedEngine
from polyrl_rollout.testing.simulation.invariants import Violation
from polyrl_rollout.testing.simulation.manager import Rows, Store
from polyrl_rollout.testing.simulation.schedule import OWN_FAULTS, EnginePlan, Schedule, SimulatedFault
from polyrl_rollout.testing.simulation.trainer import SimulatedTrainer
from polyrl_rollout.testing.simulation.world import World

QUIET_S: Final = 200.0
"""Virtual seconds in which every run must get on: above a stall, a progress deadline and the longest pause of an
engine, one after the other."""

BOOT_S: Final = 2.0
"""From the end of an engine to its replacement's greeting."""

FLAPS: Final = 5

SLEEPLESS_TIMES: Final = 5
"""So much longer than other faults: some end after the deadline for falling asleep."""


class Result(NamedTuple):
    """How a run ended."""

    counters: Counters
    virtual_s: float
    events: int
    shown: frozenset[str]
    """Invariants of which the audit has seen something."""


class _Fleet:
    """Engines, their replacements, and the faults that are injected into them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engines: list[SimulatedEngine] = []
        for plan in world.schedule.engines:
            self._start(plan)

    def _start(self, plan: EnginePlan) -> None:
        self._engines.append(SimulatedEngine(self._world, f"e{len(self._engines)}", plan))

    def inject(self, fault: SimulatedFault) -> None:
        """One fault on one live preemptible engine, or on those on the trainer's devices."""
        if fault.kind in OWN_FAULTS:
            self._inject_own(fault)
            return
        live = [engine for engine in self._engines if engine.alive and not engine.plan.reserved]
        if live:
            engine = live[fault.target % len(live)]
            _ENGINE_FAULTS.get(fault.kind, _lie)(engine, fault)
            if fault.kind in ("kill", "preempt", "drain", "quit"):
                self._world.after(BOOT_S + fault.seconds, lambda: self._start(engine.plan))

    def _inject_own(self, fault: SimulatedFault) -> None:
        for engine in [one for one in self._engines if one.alive and one.plan.reserved]:
            if fault.kind == "ownKill":
                engine.kill()
                self._world.after(BOOT_S + fault.seconds, lambda engine=engine: self._start(engine.plan))  # type: ignore[misc]
            elif fault.kind == "ownSleepless":
                engine.sleepless_until = self._world.now + SLEEPLESS_TIMES * fault.seconds
            else:
                (_freeze if fault.kind == "ownFreeze" else _break)(engine, fault)


def _kill(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.kill()


def _preempt(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.leaving(fault.seconds)


def _freeze(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.frozen_until = max(engine.frozen_until, engine.world.now + fault.seconds)


def _stall(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.stalled_until = engine.world.now + 3 * fault.seconds


def _slow(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.slow_until = engine.world.now + fault.seconds


def _break(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.partition(fault.seconds)


def _flap(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    for turn in range(FLAPS):
        engine.world.after(turn * fault.seconds / FLAPS, engine.partition)


def _drain(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.world.operator_drains(engine.name, fault.seconds)


def _quit(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.leave()


def _flood(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.flood(engine.world.now + fault.seconds)


def _lie(engine: SimulatedEngine, fault: SimulatedFault) -> None:
    engine.lies[fault.kind] = engine.lies.get(fault.kind, 0) + 1 + int(fault.seconds / 4)


_ENGINE_FAULTS: Final[dict[str, Callable[[SimulatedEngine, SimulatedFault], None]]] = {
    "kill": _kill,
    "preempt": _preempt,
    "freeze": _freeze,
    "stall": _stall,
    "slow": _slow,
    "break": _break,
    "flap": _flap,
    "drain": _drain,
    "quit": _quit,
    "flood": _flood,
}


def run_schedule(schedule: Schedule, make_store: Callable[[LedgerState], Store] = Rows) -> Result:
    """Runs it. Raises Violation."""
    world = World(schedule, make_store)
    fleet = _Fleet(world)
    trainer = SimulatedTrainer(world)
    for fault in schedule.faults:
        world.at(fault.at, lambda fault=fault: _inject(world, fleet, trainer, fault))  # type: ignore[misc]
    try:
        world.run(lambda: trainer.done, QUIET_S)
    except (PolyRLError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Violation(world.now, "total", f"the ledger raises {error!r}") from error
    shown = world.watcher.at_end(world.now)
    return Result(world.manager.ledger.state.counters, world.now, events=world.events, shown=shown)


def _inject(world: World, fleet: _Fleet, trainer: SimulatedTrainer, fault: SimulatedFault) -> None:
    if fault.kind == "trainerBreak":
        trainer.partition()
    elif fault.kind == "trainerKill":
        trainer.kill()
    elif fault.kind == "trainerRollback":
        trainer.roll_back()
    elif fault.kind == "trainerTwin":
        trainer.wake_predecessor()
    elif fault.kind == "loseBatch":
        trainer.lose_next = Batch
    elif fault.kind == "loseAnswer":
        trainer.lose_next = Accepted
    elif fault.kind == "managerAway":
        world.send_manager_away(fault.seconds)
    elif fault.kind in ("managerKill", "managerPowerLoss", "journalLoss"):
        lost, cut = fault.kind == "journalLoss", fault.kind == "managerPowerLoss"
        world.kill_manager(fault.seconds, power_loss=cut, journal_loss=lost)
    elif fault.kind == "managerKillMidway":
        world.dies_midway = fault.seconds
    elif fault.kind == "managerPowerLossMidway":
        world.power_loss_midway = fault.seconds
    else:
        fleet.inject(fault)


def shrink(schedule: Schedule) -> tuple[Schedule, Violation | None]:
    """The same schedule with as few faults as still break an invariant, and that invariant; None if none breaks."""
    broken = _violation(schedule)
    removable = broken is not None
    while removable:
        removable = False
        for index in range(len(schedule.faults)):
            smaller = msgspec.structs.replace(schedule, faults=schedule.faults[:index] + schedule.faults[index + 1 :])
            found = _violation(smaller)
            if found is not None:
                schedule, broken, removable = smaller, found, True
                break
    return schedule, broken


def _violation(schedule: Schedule) -> Violation | None:
    try:
        run_schedule(schedule)
    except Violation as violation:
        return violation
    return None
