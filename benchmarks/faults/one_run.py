"""One job over real processes, with faults, from its first process to its judgement.

The manager with its journal, two agents each with an engine's process, the trainer, and the runner's own loop
(`LocalRun`), which starts again what dies. Checked: how the run ended and within which time, what it trained against
the undisturbed run, groups that were dropped without need, processes that outlived it, and the journal's own audit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil
from computed import hashed_outcome
from hash_trainer import DROPPED
from injector import FaultInjector, Victims, belongs
from jobs import JobKind, write_inputs
from outcome import Outcome, differences, read_outcome
from plan import PlannedFault

from polyrl.forks import ForkServer
from polyrl.ledger.events import Moved
from polyrl.sample import DiscardReason
from polyrl.testing.started import words_of
from polyrl.wire import GroupDropped
from polyrl_cli.inspection.check import audit_journal
from polyrl_cli.inspection.journal_reader import open_journal
from polyrl_cli.local.chaos import FaultSchedule
from polyrl_cli.local.manager import LocalManager
from polyrl_cli.local.process_fleet import ProcessFleet
from polyrl_cli.local.run_folder import RunFolder, locked, prepare_folder
from polyrl_cli.local.runner import LocalRun
from polyrl_cli.report.timeline import Timeline

JOURNAL: Final = "journal.sqlite"
"""In the run's folder."""

GONE_S: Final = 10.0
"""Until the kernel has ended what its parent's end takes along, on cores where that waits for its turn."""


@dataclass(frozen=True)
class RunResult:
    """A run that is over."""

    faults: Sequence[PlannedFault]
    """Those that were injected."""
    seconds: float
    moved: int
    """Samples' moves from one engine to another."""
    outcome: Outcome
    violations: Sequence[str]


def run_job(
    root: Path,
    kind: JobKind,
    faults: Sequence[PlannedFault],
    undisturbed: Outcome | None,
    forks: ForkServer | None = None,
) -> RunResult:
    """Runs in the empty folder `root`. `undisturbed`: what must come out; None when nobody knows it yet. `forks`: makes
    the processes that it takes."""
    write_inputs(root)
    folder = RunFolder(root)
    began = time.monotonic()
    with locked(folder):
        run_epoch = prepare_folder(folder, kind.manifest(), root)
        injected, violations = asyncio.run(_run(folder, run_epoch, kind, faults, undisturbed, forks))
    seconds = time.monotonic() - began
    outcome, broken = _outcome(root, kind, undisturbed)
    violations += [*broken, *orphans(root), *_dropped(root)]
    if not (root / JOURNAL).exists():
        return RunResult(injected, seconds, moved=0, outcome=outcome, violations=[*violations, "there is no journal"])
    violations += _broken_invariants(root)
    return RunResult(injected, seconds, moved=_moves(root), outcome=outcome, violations=violations)


async def _run(
    folder: RunFolder,
    run_epoch: int,
    kind: JobKind,
    faults: Sequence[PlannedFault],
    undisturbed: Outcome | None,
    forks: ForkServer | None,
) -> tuple[Sequence[PlannedFault], list[str]]:
    client = LocalManager(folder.endpoints, folder.keys / "operator.key", run_epoch)
    timeline = Timeline(folder.timeline, time.monotonic, lambda _: None)
    local = LocalRun(kind.workers(folder, run_epoch), ProcessFleet(folder.logs, forks), client, timeline, folder.keys)
    tokens = 0 if undisturbed is None else undisturbed.tokens
    injector = FaultInjector(local, Victims(kind, folder.root), faults, tokens)
    injecting = asyncio.create_task(injector.inject_all())
    violations: list[str] = []
    try:
        async with asyncio.timeout(kind.deadline_s):
            end = await local.run(FaultSchedule([]))
        if not end.ok:
            violations.append(f"the run failed: {end.why}")
    except TimeoutError:
        violations.append(f"the run was not over after {kind.deadline_s:g} s")
    finally:
        injecting.cancel()
        await asyncio.gather(injecting, return_exceptions=True)
        timeline.close()
    return injector.injected, violations


def _outcome(root: Path, kind: JobKind, undisturbed: Outcome | None) -> tuple[Outcome, list[str]]:
    try:
        outcome = read_outcome(root)
    except OSError as error:
        return Outcome(), [f"nothing was trained: {error}"]
    if kind.ahead:  # which version made a token is a matter of moments, but what each of them makes is not
        outcome.faults.clear()
        return outcome, list(differences(outcome, hashed_outcome(kind.ahead, outcome)))
    return outcome, list(differences(outcome, undisturbed or outcome))


def orphans(root: Path) -> Iterable[str]:
    """Processes of the run that live on."""
    left = [process for process in psutil.process_iter() if belongs(process, root)]
    _, alive = psutil.wait_procs(left, timeout=GONE_S)
    for process in alive:
        yield f"process {process.pid} outlived the run: {' '.join(words_of(process))}"


def _moves(root: Path) -> int:
    with open_journal(root / JOURNAL) as journal:
        return sum(isinstance(entry.event, Moved) for entry in journal.history())


def _broken_invariants(root: Path) -> Iterable[str]:
    for verdict in audit_journal(root / JOURNAL):
        if verdict.broken:
            yield f"{verdict.invariant} ({verdict.title}) is broken {verdict.broken} times, first {verdict.first}"


def _dropped(root: Path) -> Iterable[str]:
    """No fault costs a group, but for those that a killed trainer had asked for and its successor does not want."""
    file = root / DROPPED
    for line in file.read_bytes().splitlines() if file.exists() else ():
        notice = msgspec.json.decode(line, type=GroupDropped)
        if notice.reason is not DiscardReason.STALE:
            yield f"group {notice.group} was dropped: {notice.reason}, {notice.detail}"
