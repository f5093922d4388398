"""Rows, model and code as a run would find them, in seconds: processes of the trainer's package look, and report here.

    data ───┐
    model ──┼─> lines in files ─> faults at their fields, notes of what could not be looked at
    code ───┘

User code runs there and never here. A process that does not end within its deadline is ended, and what it was at is
named: code that hangs is a fault, rows that take long are a note.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from polyrl.forks import Forked, OutputFiles, start
from polyrl.manifest.job import PolyRLJob
from polyrl.wire.checks import (
    CheckBegan,
    CheckEnded,
    CheckFault,
    CheckMessage,
    CheckNote,
    CheckPart,
    CheckSkipped,
    CheckUnmade,
    RewardTried,
    decode_checks,
)
from polyrl.worker import user_env, user_inherits
from polyrl_cli.environment import process_environment
from polyrl_cli.manifests.yaml_source import ManifestFault
from polyrl_trainer.sample_log.texts import readable
from polyrl_trainer.sinks.packages import missing_for_sinks

REWARD_FIELD: Final = ("spec", "recipe", "reward", "function")

DEADLINES_S: Final = {CheckPart.DATA: 300.0, CheckPart.MODEL: 60.0, CheckPart.CODE: 60.0, CheckPart.REWARD: 60.0}
"""Code that imports torch and calls a judge takes some ten seconds; reading rows takes 3 s per 100,000."""

NEEDS: Final = "needs the trainer extra (pip install 'polyrl[trainer]'); these checks were not made"

MAX_REFUSAL_CHARS: Final = 1000
"""Shown of what user code raised; `polyrl reward` shows more."""

SHOWN_BYTES: Final = 8192
"""Bytes shown of the beginning, and as many of the end, of what user code printed."""

JOB_FILE: Final = "job.json"

LAST_LINES: Final = 3
"""Shown of what a process printed that broke; the last line of a traceback says what it was."""


@dataclass(frozen=True)
class Checked:
    """What was found."""

    faults: list[ManifestFault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmade: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""
    tried: RewardTried | None = None
    printed: str = ""
    """By user code."""


@dataclass
class _Started:
    part: CheckPart
    report: Path
    output: Path
    process: subprocess.Popen[bytes] | Forked
    deadline_s: float
    began: float = field(default_factory=time.monotonic)


def check_job(job: PolyRLJob, manifest_dir: Path) -> Checked:
    """All parts, beside each other."""
    parts = [CheckPart.DATA, CheckPart.CODE]
    if job.spec.recipe.model.config is not None or job.spec.recipe.model.lora is not None:
        parts.append(CheckPart.MODEL)
    with _folder_with(job) as folder:
        started = [_start(job, manifest_dir, folder, part) for part in parts]
        found = [_finished(process) for process in started]
    # Once each: a file may stand in the manifest for training and for evaluation.
    faults = list({fault.sentence: fault for one in found for fault in one.faults}.values())
    notes = list(dict.fromkeys(note for one in found for note in one.notes))
    unmade = list(dict.fromkeys(note for one in found for note in one.unmade))
    tried = next((one.tried for one in found if one.tried is not None), None)
    if tried is not None and tried.refusal:
        faults.append(ManifestFault(REWARD_FIELD, _refused(tried)))
    return Checked(faults, notes, unmade=unmade, tried=tried)


def reward_on_row(job: PolyRLJob, manifest_dir: Path, row: int, response: str | None) -> Checked:
    """The reward on one row, counted from 1; a reward that is refused is in `tried`, and no fault."""
    with _folder_with(job) as folder:
        more = ("--row", str(row), *(() if response is None else (f"--response={response}",)))
        process = _start(job, manifest_dir, folder, CheckPart.REWARD, more)
        return replace(_finished(process), printed=_both_ends(process.output))


def _both_ends(file: Path) -> str:
    """What was printed, of much of it the beginning and the end."""
    size = file.stat().st_size
    with file.open("rb") as printed:
        head = printed.read(SHOWN_BYTES)
        left_out = size - 2 * SHOWN_BYTES
        printed.seek(max(len(head), size - SHOWN_BYTES))
        tail = printed.read()
    between = f"\n[… {left_out:,} bytes left out …]\n".encode() if left_out > 0 else b""
    return (head + between + tail).decode(errors="replace")


@contextmanager
def _folder_with(job: PolyRLJob) -> Iterator[Path]:
    """The job lies in it before anybody reads it: written again for each process it was empty when the one before came
    to it."""
    with tempfile.TemporaryDirectory(prefix="polyrl-check-") as folder:
        (Path(folder) / JOB_FILE).write_text(job.model_dump_json(by_alias=True, exclude_none=True))
        yield Path(folder)


def _start(job: PolyRLJob, manifest_dir: Path, folder: Path, part: CheckPart, more: Sequence[str] = ()) -> _Started:
    report, output = folder / f"{part.value}.jsonl", folder / f"{part.value}.log"
    argv = [sys.executable, "-m", "polyrl_trainer.check", "--job", str(folder / JOB_FILE), "--manifest-dir"]
    argv += [str(manifest_dir), "--out", str(report), "--part", part.value, *more]
    environment = process_environment(user_env(job.spec), user_inherits(job.spec))
    with output.open("wb") as log:
        process = start(argv, environment, OutputFiles(log.fileno(), log.fileno()), own_session=True)
    return _Started(part, report, output=output, process=process, deadline_s=_deadline(job, part))


def _deadline(job: PolyRLJob, part: CheckPart) -> float:
    reward = job.spec.recipe.reward
    calls = reward is not None and part in (CheckPart.CODE, CheckPart.REWARD)
    return DEADLINES_S[part] + (reward.timeout_seconds if calls and reward is not None else 0)


def _finished(started: _Started) -> Checked:
    """Waits until it ends or its deadline is over, and leaves none of its children."""
    try:
        started.process.wait(max(0.0, started.began + started.deadline_s - time.monotonic()))
        timed_out = False
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()
    messages = list(decode_checks(started.report.read_bytes())) if started.report.exists() else []
    return _read(started, messages, timed_out)


def _read(started: _Started, messages: Sequence[CheckMessage], timed_out: bool) -> Checked:
    faults = [ManifestFault(one.field, one.sentence) for one in messages if isinstance(one, CheckFault)]
    skipped = [f"{one.what} ({one.module})" for one in messages if isinstance(one, CheckSkipped)]
    unmade = [f"{NEEDS}: {', '.join(skipped)}"] if skipped else []
    unmade += [one.sentence for one in messages if isinstance(one, CheckUnmade)]
    notes = [one.sentence for one in messages if isinstance(one, CheckNote)]
    tried = next((one for one in messages if isinstance(one, RewardTried)), None)
    began = next((one for one in reversed(messages) if isinstance(one, CheckBegan)), None)
    if not any(isinstance(one, CheckEnded) for one in messages):
        unfinished = _unfinished(started, began, timed_out)
        # Slow files are no fault; rows that end the process that reads them would end the run.
        ends_runs = started.part in (CheckPart.CODE, CheckPart.REWARD) or (
            started.part is CheckPart.DATA and not timed_out
        )
        if began is not None and ends_runs:
            faults.append(ManifestFault(began.field, unfinished))
        else:
            unmade.append(unfinished)
    return Checked(faults, notes, unmade=unmade, tried=tried)


def _unfinished(started: _Started, began: CheckBegan | None, timed_out: bool) -> str:
    what = began.what if began is not None else f"the check of {started.part.value}"
    if timed_out:
        return f"{what} did not end within {started.deadline_s:g} s"
    last = started.output.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
    return f"{what} ended the process with exit code {started.process.returncode}: {' | '.join(last)}"


def _refused(tried: RewardTried) -> str:
    refusal = readable(tried.refusal, MAX_REFUSAL_CHARS)
    return f"on {tried.place}, for response {_short(tried.response)}: {refusal}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def missing_sinks(job: PolyRLJob) -> Iterator[ManifestFault]:
    """Sinks of metrics that need what is not installed here."""
    for name, sentence in missing_for_sinks(job.spec.recipe.logging):
        yield ManifestFault(("spec", "recipe", "logging", name), sentence)


def unset_variables(job: PolyRLJob) -> Iterator[ManifestFault]:
    """Variables that the manifest takes from the user's environment, which has them not."""
    for index, variable in enumerate(job.spec.recipe.env):
        if variable.value is None and variable.name not in os.environ:
            sentence = f"{variable.name} is not set in your environment; export it, or give it a value"
            yield ManifestFault(("spec", "recipe", "env", index, "name"), sentence)
