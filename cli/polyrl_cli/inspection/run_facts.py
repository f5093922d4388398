"""What is known of a run from its folder alone, live or ended, whole or killed: for lists and comparisons."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from polyrl.history.foreign_text import printable
from polyrl.history.results import Course, EvaluationPoint, courses, evaluations
from polyrl.history.rows import MetricsRow
from polyrl.history.steps import number_in, object_in, steps_done, wanted_steps
from polyrl_cli.local.run_folder import MAX_DIGITS, RunFolder
from polyrl_cli.report.timeline import read_metrics


class LocalRunState(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    """Its runner is at work."""
    SUCCEEDED = "succeeded"
    """It came to its end."""
    FAILED = "failed"
    """It could not go on; its summary says why."""
    INTERRUPTED = "interrupted"
    """It was asked to stop, and saved."""
    KILLED = "killed"
    """Its runner is gone and left no summary; it can be resumed if it has a checkpoint."""


MAX_LEVELS: Final = 64
"""Levels of nesting in a file of a run, which may be anybody's; a manifest has 14."""
MAX_SETTINGS: Final = 5_000
"""Values of a manifest, which has some hundred; YAML takes a sixth of a millisecond to write one."""
MAX_PATH_CHARS: Final = 512
"""Characters of all keys above a setting together, by which it is named: a label's own has 317."""
TRAINER_OUTCOMES: Final = {"done": LocalRunState.SUCCEEDED, "stopped": LocalRunState.INTERRUPTED}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One run, as of its newest start."""

    root: Path
    name: str
    state: LocalRunState
    steps: dict[str, int]
    """Whole ones, by stage."""
    wanted: dict[str, int]
    """Steps that the manifest asks for, by stage."""
    learned: dict[str, Course]
    evaluation: EvaluationPoint | None
    """The last one."""
    started: float
    """Unix seconds."""
    seconds: float
    settings: dict[str, Any]
    """The whole manifest, every default filled in."""
    summary: dict[str, Any]
    """summary.json; empty while there is none."""
    rows: list[MetricsRow]
    attempt: int = 1
    """Which start of it this is: time and summary are of this one alone."""


def read_facts(folder: RunFolder, now: float) -> RunFacts:
    """All of it; what cannot be read is left out, for a list of runs should not end at a broken one."""
    job = _settings(folder.job)
    started = folder.job.stat().st_mtime
    # An earlier start's summary has another name.
    ended = folder.summary.is_file()
    summary = _json(folder.summary) if ended else {}
    rows = read_metrics(folder.metrics)
    newest = max((row.time for row in rows), default=started)
    if not ended and is_locked(folder):
        state, until = LocalRunState.RUNNING, now
    else:
        state = _state(summary.get("outcome") or _json(folder.trainer_result).get("outcome"))
        if newest < started:  # fetched from a cluster, after all of it
            started = rows[0].time
        until = newest
    points = evaluations(rows)
    return RunFacts(
        root=folder.root,
        name=printable(str(object_in(job, "metadata").get("name", "?"))),
        state=state,
        steps=steps_done(rows),
        wanted=wanted_steps(job),
        learned=courses(rows),
        evaluation=points[-1] if points else None,
        started=started,
        seconds=number_in(summary, "wallSeconds", until - started),
        settings=job,
        summary=summary,
        rows=rows,
        attempt=_attempt(folder),
    )


def _attempt(folder: RunFolder) -> int:
    try:
        return max(1, int(folder.epoch.read_bytes()[:MAX_DIGITS]))
    except (OSError, ValueError):
        return 1


def is_locked(folder: RunFolder) -> bool:
    """True while a runner holds the folder. Asked only of runs without a summary: the look itself holds the lock for a
    moment, in which a runner would be refused."""
    try:
        with folder.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _state(outcome: object) -> LocalRunState:
    """By a summary's word, or by the trainer's where a run was fetched from a cluster."""
    named = TRAINER_OUTCOMES.get(str(outcome), outcome)
    return next((state for state in LocalRunState if state == named), LocalRunState.KILLED)


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and _is_shallow(value) else {}


def _settings(file: Path) -> dict[str, Any]:
    """A manifest; one of more values, or longer keys, than anybody writes is as good as none."""
    job = _json(file)
    left: list[tuple[dict[str, Any] | list[Any], int]] = [(job, 0)]
    values = 0
    while left:
        one, chars = left.pop()
        values += len(one)
        for key, below in one.items() if isinstance(one, dict) else [("", below) for below in one]:
            if values > MAX_SETTINGS or chars + len(key) > MAX_PATH_CHARS:
                return {}
            if isinstance(below, dict | list):
                left.append((below, chars + len(key)))
    return job


def _is_shallow(value: object) -> bool:
    """Whether whoever goes through it level by level comes to an end before Python's stack does."""
    level = [value]
    for _ in range(MAX_LEVELS):
        below = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for inner in below for one in inner]
    return not level
