"""Where a run keeps what it writes: one folder, its paths by name, one runner at a time.

job.json  keys/  run/endpoints/  run/control.sock  logs/   what the workers need and print, the control socket
fleet.jsonl  metrics.jsonl  samples.jsonl  tensorboard/    what happened, what was measured, what the model wrote
checkpoints/  journal.sqlite  trainer-result.json  summary.json  run.png

Commands that only read a run import this, so it imports no package of an extra before something is written.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from polyrl.errors import UNDECODABLE, UserError
from polyrl.manifest.job import PolyRLJob
from polyrl.sample_record import SAMPLES
from polyrl_cli.local.ownership import OWNER_ONLY

T = TypeVar("T")

RUNS: Final = Path("runs")
"""Where `polyrl run` puts runs unless `--out` says otherwise."""

PRINTS: Final = "prints.log"
"""Standard output of all trainers of a run: what user code prints."""

NAMED_RUNS: Final = 3
"""Runs that are named when the one asked for does not exist."""

OLDER_JOURNAL: Final = "journal-of-epoch-"

MAX_DIGITS: Final = 10
"""Digits of an epoch in a file's name; Python refuses to read numbers of thousands."""

TRACEBACK: Final = "Traceback (most recent call last):"

TAIL_BYTES: Final = 16384
"""How much of a log's end is read; a hundred long lines."""

ODD_FILE: Final = "a link or a pipe, which no run makes; delete it if the folder is not yours"
READ_BYTES: Final = 1 << 30
"""Bytes read of a file of rows: those of a million steps. One without content may claim any size."""
VALUE_BYTES: Final = 16 << 20
"""Bytes read of a file that is one value, as a manifest: of lists within lists Python makes twenty times as much."""
JOB_BYTES: Final = 1 << 20
"""Bytes read of a manifest: a ConfigMap, by which a cluster hands it on, holds no more."""
BESIDE_JOURNAL: Final = ("-wal", "-shm", "-journal")
"""What SQLite reads with a journal, when it is there."""
STATE: Final = "state.json"


class RunFolder:
    """The folder of one run, and the paths of what lies in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job = root / "job.json"
        self.keys = root / "keys"
        self.endpoints = root / "run" / "endpoints" / "manager.json"
        self.epoch = root / "run" / "epoch"
        """Counts its starts."""
        self.control = root / "run" / "control.sock"
        """The runner's socket, there while it is at work."""
        self.manifest_dir = root / "run" / "manifest-dir"
        """Names the folder that the manifest's relative paths start from."""
        self.logs = root / "logs"
        self.prints = self.logs / PRINTS
        self.timeline = root / "fleet.jsonl"
        self.metrics = root / "metrics.jsonl"
        self.samples = root / SAMPLES
        self.trainer_result = root / "trainer-result.json"
        self.summary = root / "summary.json"
        self.checkpoints = root / "checkpoints"
        self.plot = root / "run.png"
        self.journal = root / "journal.sqlite"
        self.lock = root / "run" / "lock"

    def older_journals(self) -> list[Path]:
        """Journals that `polyrl run --resume` has set aside, the oldest first."""
        epochs = {path: path.stem.removeprefix(OLDER_JOURNAL) for path in self.root.glob(f"{OLDER_JOURNAL}*.sqlite")}
        ours = {path: int(epoch) for path, epoch in epochs.items() if epoch.isdecimal() and len(epoch) < MAX_DIGITS}
        return sorted(ours, key=lambda path: ours[path])

    def read_files(self) -> list[Path]:
        """What commands read of a run."""
        run = (self.lock.parent, self.lock, self.job, self.endpoints, self.epoch, self.manifest_dir)
        written = (*self._rows(), self.trainer_result, self.summary)
        journals = [self.journal, *self.older_journals()]
        beside = [path.with_name(path.name + end) for path in journals for end in BESIDE_JOURNAL]
        kept = (self.checkpoints, *self.checkpoints.glob("*"), *self.checkpoints.glob("*/*"))
        return [*run, *written, *journals, *beside, *kept]

    def _rows(self) -> tuple[Path, ...]:
        return self.timeline, self.metrics, self.samples

    def fault(self) -> str | None:
        """What no run makes, and no command reads, in a sentence: a pipe, which would be read for ever, a link to what
        is not the run's, a file beyond reading. A received folder may hold some."""
        return next(filter(None, map(self._fault_of, self.read_files())), None)

    def _fault_of(self, file: Path) -> str | None:
        if not os.path.lexists(file):
            return None
        found = file.lstat()
        if stat.S_IFMT(found.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            return f"{file}: {ODD_FILE}"
        most = self._most_bytes(file)
        if most is not None and found.st_size > most:
            return f"{file}: has {found.st_size:,} bytes; at most {most:,} are read"
        return None

    def _most_bytes(self, file: Path) -> int | None:
        """None for what is not read whole: a journal, of which SQLite reads what it needs, and a model."""
        if file in self._rows() or file.name == STATE:
            return READ_BYTES
        if file == self.job:
            return JOB_BYTES
        return VALUE_BYTES if file.suffix == ".json" or file.parent == self.lock.parent else None

    def log_of(self, worker: str) -> Path:
        return self.logs / f"{worker}.log"


def find_run(given: Path | None) -> RunFolder:
    """The folder of a run: `given`, else the newest under `runs/`. Raises UserError when no run lies there."""
    if given is None:
        runs = runs_under(RUNS)
        if not runs:
            raise UserError(f"{RUNS.resolve()}: no run lies there; name the folder of one")
        given = runs[0]
    return existing_folder(given, str(given))


def is_finished(folder: RunFolder) -> bool:
    """Whether its trainer got to the end."""
    try:
        return bool(json.loads(folder.trainer_result.read_bytes())["outcome"] == "done")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def new_run_folder(out: Path | None, job_name: str, now: datetime) -> RunFolder:
    """Makes the folder of a new run: `out`, else runs/<job>-<UTC time>. Raises UserError when `out` is not empty."""
    root = out if out is not None else RUNS / f"{job_name}-{now:%Y%m%d-%H%M%S}"
    try:
        if out is not None and root.is_dir() and any(root.iterdir()):
            raise UserError(f"--out {root}: the folder is not empty; name a new one, or continue with --resume {root}")
        root = _made(root, alone=out is None)
        root.chmod(OWNER_ONLY)
    except OSError as error:
        raise UserError(f"{root}: cannot make the run's folder: {error.strerror}") from error
    return RunFolder(root.resolve())


def _made(root: Path, *, alone: bool) -> Path:
    """The folder; with `alone` one that nobody else has, numbered where runs begin within one second."""
    folder = root
    for number in count(2):
        try:
            folder.mkdir(parents=True, exist_ok=not alone)
        except FileExistsError:
            if not alone:
                raise
            folder = root.with_name(f"{root.name}-{number}")
        else:
            break
    return folder


def existing_folder(root: Path, named: str) -> RunFolder:
    """The folder of a run that was begun, called `named` by the user. Raises UserError when no run lies there."""
    folder = RunFolder(root.resolve())
    if folder.job.is_dir() or not os.path.lexists(folder.job):
        newest = [str(run) for run in runs_under(RUNS)[:NAMED_RUNS]]
        known = f"; the newest runs here are {', '.join(newest)}" if newest else ""
        raise UserError(f"{named}: no run lies there (it has no job.json){known}")
    if fault := folder.fault():
        raise UserError(fault)
    return folder


def manifest_dir(folder: RunFolder) -> Path:
    """Where the relative paths of the run's manifest begin. Raises UserError when that is not known or is gone."""
    try:
        found = Path(folder.manifest_dir.read_text().strip())
    except OSError:
        found = None
    if found is None or not found.is_dir():
        gone = "does not say where its manifest lay" if found is None else f"its manifest lay in {found}, which is gone"
        raise UserError(f"{folder.root}: {gone}; name the manifest: polyrl run FILE --resume {folder.root}")
    return found


def runs_under(folder: Path) -> list[Path]:
    """Folders of runs that lie in `folder`, the newest first."""
    jobs = list(folder.glob("*/job.json"))
    return [job.parent for job in sorted(jobs, key=lambda job: job.lstat().st_mtime, reverse=True)]


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Holds the folder for one runner. Raises UserError when another one has it."""
    lock = folder.lock
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{folder.root}: another `polyrl run` is at work in this folder") from error
        yield


def prepare_folder(folder: RunFolder, job: PolyRLJob, manifest_dir: Path) -> int:
    """Writes what the workers read, draws keys, and returns the run_epoch: 1, then 2, ...

    Keys of an earlier start are known to whoever had the folder then, and nothing that holds them lives any more.

    Raises UserError, before it changes anything, when the folder's count cannot be read."""
    last = _last_epoch(folder)
    folder.endpoints.parent.mkdir(parents=True, exist_ok=True)
    folder.endpoints.unlink(missing_ok=True)
    folder.trainer_result.unlink(missing_ok=True)
    from polyrl_operator.secret import write_run_keys

    if folder.keys.exists():
        shutil.rmtree(folder.keys)
    write_run_keys(folder.keys)
    folder.manifest_dir.write_text(f"{manifest_dir.resolve()}\n")
    folder.job.write_text(job.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n")
    return _next_epoch(folder, last)


def _last_epoch(folder: RunFolder) -> int:
    file = folder.epoch
    try:
        return int(file.read_text()) if file.exists() else 0
    except ValueError:
        raise UserError(f"{file}: must hold the number of the run's last start") from None


def _next_epoch(folder: RunFolder, last: int) -> int:
    """Counts the run_epoch, and sets aside what the last one left: its samples are fenced, its history is kept, and its
    errors are not taken for this one's."""
    for part in folder.root.glob("journal.sqlite*"):
        part.rename(part.with_name(part.name.replace("journal", f"journal-of-epoch-{last}", 1)))
    for part in (folder.summary, folder.logs):
        if part.exists():
            part.rename(part.with_name(f"{part.stem}-of-epoch-{last}{part.suffix}"))
    folder.logs.mkdir()
    _write_epoch(folder.epoch, last + 1)
    return last + 1


def _write_epoch(path: Path, run_epoch: int) -> None:
    """Writes the count as a whole, on the disk before anybody is of this epoch: after a power cut an empty one would
    end the run, an older one would have a later epoch's files set aside under an earlier one's name."""
    fresh = path.with_name(f".{path.name}")
    with fresh.open("w") as file:
        file.write(f"{run_epoch}\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class KeptState(msgspec.Struct):
    """What a runner reads of a checkpoint's state.json: where a trainer goes on that is started here."""

    stage: str = ""
    step: int = 0
    """Whole steps of `stage`."""
    trained_groups: int = 0
    """Groups of the next step that are trained already."""

    @property
    def rl_steps(self) -> int:
        """Whole RL steps."""
        return self.step if self.stage == "rl" else 0


class _CheckpointSeal(msgspec.Struct):
    """What a runner reads of a checkpoint's COMPLETE.json."""

    serial: int = 0
    """Counts the saves of a folder."""


def kept_state(folder: RunFolder) -> KeptState:
    """State in the newest complete checkpoint, if there is one. Raises UserError naming one that cannot be read."""
    newest = newest_checkpoint(folder)
    return KeptState() if newest is None else _read_as(KeptState, newest / STATE)


def newest_checkpoint(folder: RunFolder) -> Path | None:
    """The complete one that was saved last. Raises UserError naming one that cannot be read."""
    found = {
        seal.parent: _read_as(_CheckpointSeal, seal).serial for seal in folder.checkpoints.glob("[!.]*/COMPLETE.json")
    }
    return max(found, key=lambda path: (found[path], path.name), default=None)


def _read_as(kind: type[T], file: Path) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, *UNDECODABLE) as error:
        raise UserError(f"{file}: not a trainer's state: {error}") from error


def last_words(log: Path) -> str:
    """What a worker printed after its last log record (a JSON object): the sentence with which it gave up."""
    words: list[str] = []
    for line in reversed(end_of_log(log, TAIL_BYTES)):
        if line.startswith("{"):
            break
        words.append(line)
    return "\n".join(reversed(words)).strip()


def cause_of(log: Path, room: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free) -> str:
    """The sentence with which a worker gave up; of a traceback, what it ends with. On a full disk it could say none."""
    words = last_words(log)
    if not words and not room(log.parent):
        return f"no space is left on the disk of {log.parent}"
    return words.splitlines()[-1] if TRACEBACK in words else words


def end_of_log(log: Path, lines: int) -> list[str]:
    """The last `lines` lines of a log; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]
