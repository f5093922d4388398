"""A local run's planner: from what is wanted and what is seen to what to do next, as a pure function.

    nothing runs -> manager -> (its endpoints are known) -> trainer, reserved engine, rollouts
    manager or engine is gone      -> another, under a new name; after a failed start only once its back-off is over,
                                      and on the GPUs of one that is gone, never of one that is going
    the trainer was killed         -> another, from its newest checkpoint, up to backoffLimit times
                                      or the end, if it had reported success
    engines fail at start again and again  -> `starts` judges: tried again, the run waits and says so; or no more of
                                      them, the run goes on with the others, and reports it
    managers do, or a trainer explains why it cannot go on  -> the run ends, naming it
    asked to stop                  -> the trainer first, then all others

The operator plans pods by itself (`polyrl.cluster`); the two share what a worker's exit means (`polyrl.worker`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from typing import Final, TypeAlias

from polyrl.local.starts import (
    LONGEST_RESTART_BACKOFF_S,
    RETRIES_S,
    FailedStart,
    StartVerdict,
    how_it_ended,
    judge,
    pause_after,
    was_well,
)
from polyrl.worker import EXPLAINED_EXITS, USER_ERROR_EXIT, Role, Worker, Workers

MANAGER_PROVED_S: Final = 5.0
"""A manager that lived that long had bound and read its journal: its end is no failure at start."""

MANAGER_START_S: Final = 120.0
"""Longest time until its endpoints are known, or it hears of an engine: seconds, and far more on one that swaps."""

ENGINE_ROLES: Final = (Role.RESERVED, Role.ROLLOUT)

SINGLE_ROLES: Final = (Role.MANAGER, Role.RESERVED)
"""Roles of which one worker runs at a time, and another takes its place when it is gone."""


class WorkerPhase(StrEnum):
    """Where a worker is in its life. A worker never goes back; it may skip a phase."""

    STARTING = "Starting"
    """Requested, not there yet."""
    RUNNING = "Running"
    """It is there."""
    STOPPING = "Stopping"
    """Asked to end; it has until its grace is over."""
    EXITED = "Exited"
    """It has ended."""


@dataclass(frozen=True)
class Reclaim:
    """The capacity is taken away: after a spot notice, or by a kill without one."""

    deadline: float
    """Fleet time after which the worker is gone."""


@dataclass(frozen=True)
class ObservedWorker:
    """One worker as the fleet sees it."""

    name: str
    role: Role
    uid: str
    """Never reused, unlike a process id."""
    phase: WorkerPhase
    started_at: float
    exit_code: int | None = None
    """Known when EXITED; negative is the signal that ended it."""
    exited_at: float | None = None
    reclaim: Reclaim | None = None
    """Stays set after the exit: an exit that follows a reclaim is no failure."""
    gpus: tuple[str, ...] = ()
    """Its own, until it has exited."""

    @property
    def lives(self) -> bool:
        """True while a process or pod is, or may be, there."""
        return self.phase is not WorkerPhase.EXITED

    @property
    def counts(self) -> bool:
        """True when it stands for one of the wanted workers: it lives, and is not being ended."""
        return self.phase in (WorkerPhase.STARTING, WorkerPhase.RUNNING) and self.reclaim is None


@dataclass(frozen=True)
class RunObservation:
    """What is seen at one moment."""

    observed: Sequence[ObservedWorker]
    manager_ready: bool
    """Its endpoints are known, so that the others can dial it."""
    served: frozenset[str] = frozenset()
    """Engines that have ever served a weight version: their start did not fail."""
    heard: frozenset[str] = frozenset()
    """Engines that the manager has ever heard of."""
    stopping: bool = False
    """Somebody asked the run to stop."""
    finishing: bool = False
    """The trainer has reported to the manager that the job is over; a worker that ends now is not replaced."""
    succeeded: bool = False
    """It reported success, which it does once everything that it leaves is on the disk."""


@dataclass(frozen=True)
class StartWorker:
    """Start a worker."""

    worker: Worker
    why: str

    def __str__(self) -> str:
        gpus = f" on GPU {','.join(self.worker.gpus)}" if self.worker.gpus else ""
        return f"start {self.worker.name}{gpus}: {self.why}"


@dataclass(frozen=True)
class StopWorker:
    """Ask a worker to end."""

    name: str
    grace_s: float
    why: str

    def __str__(self) -> str:
        return f"stop {self.name} within {self.grace_s:g} s: {self.why}"


@dataclass(frozen=True)
class RunEnd:
    """Nothing is left to do."""

    ok: bool
    why: str
    worker: str | None = None
    """Whose end is the reason."""
    user_error: bool = False
    """The worker reports that the input is wrong: its own sentence is what the user needs."""

    def __str__(self) -> str:
        return f"end: {self.why}"


PlannedAction: TypeAlias = StartWorker | StopWorker | RunEnd


def plan(wanted: Workers, run: RunObservation, now: float) -> list[PlannedAction]:
    """What to do at fleet time `now`. A repeat is harmless: starts are idempotent by name."""
    ended = _ending(wanted, run, now)
    if ended is not None:
        return [ended]
    if run.stopping:
        return list(_stop_all(wanted, run.observed))
    return list(_start_missing(wanted, run, now))


def failed_starts(run: RunObservation, role: Role = Role.ROLLOUT) -> list[ObservedWorker]:
    """The newest of a role that ended before they were of use, and that were not taken away, oldest first."""
    failures: list[ObservedWorker] = []
    for worker in sorted(_of_role(run.observed, role), key=lambda seen: seen.started_at):
        if _was_of_use(run, worker):
            failures.clear()
        elif not worker.lives and worker.reclaim is None:
            failures.append(worker)
    return failures


def _was_of_use(run: RunObservation, worker: ObservedWorker) -> bool:
    lived_s = 0.0 if worker.exited_at is None else worker.exited_at - worker.started_at
    if worker.role is Role.MANAGER:
        return lived_s >= MANAGER_PROVED_S
    return worker.name in run.served or was_well(worker.exit_code or 0, lived_s)


def _verdict(run: RunObservation, role: Role) -> StartVerdict | None:
    failures = [
        FailedStart(one.name, one.exit_code or 0, started_at=one.started_at, exited_at=one.exited_at or 0.0)
        for one in failed_starts(run, role)
    ]
    of_use = [one for one in _of_role(run.observed, role) if _was_of_use(run, one)]
    ends = [math.inf if one.exited_at is None else one.exited_at for one in of_use]
    return judge(failures, proven_until=max(ends, default=-math.inf))


def _given_up(run: RunObservation, role: Role) -> bool:
    verdict = _verdict(run, role)
    return verdict is not None and verdict.again_at is None


def run_conditions(wanted: Workers, run: RunObservation, now: float) -> list[str]:
    """What a person should know about the fleet, one sentence each; empty when all is as wanted."""
    if run.stopping or run.finishing:
        return []
    rollouts, reserved = _verdict(run, Role.ROLLOUT), _verdict(run, Role.RESERVED)
    sentences = []
    if rollouts is not None and rollouts.again_at is None:
        sentences.append(f"rollouts given up: the last {rollouts.why}")
    if wanted.reserved is not None and reserved is not None and reserved.again_at is None:
        sentences.append(f"the reserved engine is given up: the last {reserved.why}; rollouts generate alone")
    if rollouts is not None and rollouts.repeats:
        again = f"they are tried again, up to {LONGEST_RESTART_BACKOFF_S:.0f} s apart"
        sentences.append(f"rollouts that start fail, though others have served: the last {rollouts.why}; {again}")
    waits = [one.why for one in (reserved, rollouts) if one is not None and one.from_outside]
    if waits and not any(one.lives and one.name in run.served for one in run.observed):
        limit = f"starts that are killed or too slow are repeated for {RETRIES_S / 60:.0f} min"
        sentences.append(f"the run waits for an engine: {'; '.join(waits)}; {limit}")
    late = (e for e in run.observed if e.role in ENGINE_ROLES and e.counts and e.started_at + MANAGER_START_S < now)
    mute = ", ".join(engine.name for engine in late if run.manager_ready and engine.name not in run.heard)
    if mute:
        sentences.append(f"the manager heard nothing of {mute} for {MANAGER_START_S:.0f} s; see logs/")
    return sentences


def next_deadline(wanted: Workers, run: RunObservation, now: float) -> float | None:
    """Fleet time at which `plan` may say something new without any event, because a back-off ends; None when never."""
    missing = {Role.ROLLOUT: _missing_rollouts(wanted, run)}
    for role in SINGLE_ROLES:
        seen = _of_role(run.observed, role)
        missing[role] = bool(seen) and not any(one.lives for one in seen)
    dues = [_may_start_at(run, role) for role, some in missing.items() if some]
    trainers = _of_role(run.observed, Role.TRAINER)
    if trainers and not trainers[-1].lives:
        dues.append(_trainer_due(trainers))
    return min((due for due in dues if due is not None and due > now), default=None)


def _ending(wanted: Workers, run: RunObservation, now: float) -> RunEnd | None:
    if run.stopping:
        return None if any(seen.lives for seen in run.observed) else RunEnd(ok=False, why="the run was asked to stop")
    trainer_ended = _trainer_ended(wanted, run)
    if trainer_ended is not None or run.finishing:
        return trainer_ended
    return _manager_ended(run, now) or _without_engines(wanted, run)


def _manager_ended(run: RunObservation, now: float) -> RunEnd | None:
    for manager in _of_role(run.observed, Role.MANAGER)[-1:]:
        useless = manager.exit_code == USER_ERROR_EXIT or _given_up(run, Role.MANAGER)
        if not manager.lives and useless:
            why = f"the manager ended with exit code {manager.exit_code} before the trainer was done"
            return RunEnd(ok=False, why=why, worker=manager.name)
        if manager.lives and not run.manager_ready and now - manager.started_at > MANAGER_START_S:
            why = f"the manager did not say where it listens within {MANAGER_START_S:g} s"
            return RunEnd(ok=False, why=why, worker=manager.name)
    return None


def _trainer_ended(wanted: Workers, run: RunObservation) -> RunEnd | None:
    """None as well when another trainer takes its place."""
    trainers = _of_role(run.observed, Role.TRAINER)
    if not trainers or trainers[-1].lives:
        return None
    last, restarts = trainers[-1], len(trainers) - 1
    if last.exit_code == 0 or (run.succeeded and last.exit_code not in EXPLAINED_EXITS):
        return RunEnd(ok=True, why="the trainer is done", worker=last.name)
    explained = run.finishing or last.exit_code in EXPLAINED_EXITS
    if not explained and _own_faults(trainers) <= wanted.trainer_restarts:
        return None
    why = f"the trainer ended with exit code {last.exit_code}" + (f", after {restarts} restarts" if restarts else "")
    return RunEnd(ok=False, why=why, worker=last.name, user_error=last.exit_code == USER_ERROR_EXIT)


def _own_faults(trainers: Sequence[ObservedWorker]) -> int:
    """How many trainers ended without being taken away."""
    return sum(not trainer.lives and trainer.reclaim is None for trainer in trainers)


def _without_engines(wanted: Workers, run: RunObservation) -> RunEnd | None:
    """With rollouts given up and no reserved engine nothing will ever generate; waiting would be for ever."""
    if wanted.manager is None or any(seen.lives for role in ENGINE_ROLES for seen in _of_role(run.observed, role)):
        return None
    failures = failed_starts(run)
    reserved_gone = wanted.reserved is None or _given_up(run, Role.RESERVED)
    rollouts_gone = wanted.rollout is None or wanted.rollouts == 0 or _given_up(run, Role.ROLLOUT)
    if not (reserved_gone and rollouts_gone):
        return None
    ended = failures or _of_role(run.observed, Role.RESERVED)
    if not ended:
        return RunEnd(ok=False, why="no engine: rollout.replicas is 0 and there is no reserved engine")
    last = ended[-1]
    why = f"no engine is left: {last.name} {how_it_ended(last.exit_code or 0)}"
    return RunEnd(ok=False, why=why, worker=last.name)


def _stop_all(wanted: Workers, observed: Sequence[ObservedWorker]) -> Iterable[PlannedAction]:
    why = "the run was asked to stop"
    trainers = [seen for seen in _of_role(observed, Role.TRAINER) if seen.lives]
    for trainer in trainers:
        yield StopWorker(trainer.name, wanted.trainer.grace_s, why=why)
    if trainers:
        return
    templates = {w.role: w for w in (wanted.manager, wanted.reserved, wanted.rollout) if w is not None}
    for seen in observed:
        if seen.lives:
            yield StopWorker(seen.name, templates[seen.role].grace_s, why=why)


def _start_missing(wanted: Workers, run: RunObservation, now: float) -> Iterable[PlannedAction]:
    if run.finishing:
        return
    if wanted.manager is not None:
        yield from _start_single(wanted.manager, run, now)
        if not run.manager_ready:
            return
    yield from _start_trainer(wanted.trainer, run, now)
    if wanted.reserved is not None:
        yield from _start_single(wanted.reserved, run, now)
    yield from _start_rollouts(wanted, run, now)


def _start_trainer(template: Worker, run: RunObservation, now: float) -> Iterable[PlannedAction]:
    seen = _of_role(run.observed, Role.TRAINER)
    if not seen:
        yield StartWorker(template, "the run begins")
    elif not seen[-1].lives and now >= _trainer_due(seen):
        why = f"{seen[-1].name} is gone; this one goes on from the newest checkpoint"
        yield StartWorker(template.named(f"{template.name}-{len(seen)}"), why)


def _trainer_due(trainers: Sequence[ObservedWorker]) -> float:
    """When another may follow the newest one, which has ended."""
    faults = _own_faults(trainers)
    return (trainers[-1].exited_at or 0.0) + (pause_after(faults) if faults else 0.0)


def _start_single(template: Worker, run: RunObservation, now: float) -> Iterable[PlannedAction]:
    seen = _of_role(run.observed, template.role)
    if not seen:
        yield StartWorker(template.named(template.name), "the run begins")
        return
    due = _may_start_at(run, template.role)
    if any(one.lives for one in seen) or _given_up(run, template.role) or (due is not None and now < due):
        return
    yield StartWorker(template.named(f"{template.name}-{len(seen)}"), f"{seen[-1].name} is gone")


def _start_rollouts(wanted: Workers, run: RunObservation, now: float) -> Iterable[PlannedAction]:
    may_start_at = _may_start_at(run, Role.ROLLOUT)
    if wanted.rollout is None or _given_up(run, Role.ROLLOUT):
        return
    if may_start_at is not None and now < may_start_at:
        return
    first = len(_of_role(run.observed, Role.ROLLOUT))
    numbers = range(first, first + _missing_rollouts(wanted, run))
    for number, gpus in zip(numbers, _free_gpus(wanted, run), strict=False):
        why = "the run begins" if number < wanted.rollouts else "another one is gone or going"
        yield StartWorker(wanted.rollout.named(f"{wanted.rollout.name}-{number}").on(gpus), why)


def _free_gpus(wanted: Workers, run: RunObservation) -> Iterator[tuple[str, ...]]:
    """For each further rollout. One under notice holds its memory to the end, so its successor waits for it."""
    if not wanted.rollout_gpus:
        return repeat(())
    taken = {one.gpus for one in _of_role(run.observed, Role.ROLLOUT) if one.lives}
    return (gpus for gpus in wanted.rollout_gpus if gpus not in taken)


def _missing_rollouts(wanted: Workers, run: RunObservation) -> int:
    return max(0, wanted.rollouts - sum(seen.counts for seen in _of_role(run.observed, Role.ROLLOUT)))


def _may_start_at(run: RunObservation, role: Role) -> float | None:
    """When the back-off of the newest exit that was not requested is over; None when there was none."""
    those = _of_role(run.observed, role)
    exits = [seen.exited_at for seen in those if seen.exited_at is not None and seen.reclaim is None]
    if not exits:
        return None
    verdict = _verdict(run, role)
    return max(exits) if verdict is None or verdict.again_at is None else max(max(exits), verdict.again_at)


def _of_role(observed: Sequence[ObservedWorker], role: Role) -> list[ObservedWorker]:
    return [seen for seen in observed if seen.role is role]
