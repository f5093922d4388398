"""The machine loses power, at any write: the journal opens, and holds all that anybody was promised.

Every write and sync that SQLite and the journal ask for is recorded (`polyrl_rollout.testing.power_loss`).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from threading import Event as Signal
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from polyrl.errors import RunFailed
from polyrl.ledger import Event, Ledger, LedgerConfig
from polyrl.ledger.journal import decode_state, encode_state
from polyrl.ledger.state import LedgerState
from polyrl_rollout.manager import journal as journal_module
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.testing.power_loss import Disk, Operation, PowerSwitch, Recorder
from polyrl_rollout.testing.simulation import draw_schedule, run_schedule
from polyrl_rollout.testing.simulation.manager import lost_by_restart
from polyrl_rollout.testing.simulation.schedule import Schedule, SimulatedFault

EPOCH = 1
BOTH_AT_ONCE_S = 0.5
"""For as long the first of two syncs is not over; a second one that does not wait for it is, meanwhile."""
CHECKPOINT_PAGES = 24
"""In the log before SQLite moves it to the file: few, so that runs of seconds meet many checkpoints."""


# --- the journal on such a disk ---------------------------------------------------------------------------------------


class JournalOnDisk:
    """The simulation's store that is a real journal; each death leaves a folder of files to the next process."""

    def __init__(self, root: Path, disk: Disk, state: LedgerState) -> None:
        self._root, self.disk, self._lives = root, disk, 0
        self.states: list[bytes] = []
        """After each commit of this life."""
        self._open()
        self._begin(state, 0.0)
        self._journal.sync()

    @property
    def commits(self) -> int:
        return self._journal.commits

    @property
    def synced(self) -> int:
        return self._journal.synced

    def commit(self, events: list[Event], state: LedgerState, at: float) -> None:
        self._journal.append(events)
        self._journal.commit(state, at)
        if self.commits == len(self.marks):
            self.marks.append(reach(self._journal))
            self.states.append(encode_state(state))

    def sync(self, commits: int) -> None:
        self._journal.sync()

    def die(self, random: Random, *, power_loss: bool) -> int:
        found = self.disk.after_power_loss(random) if power_loss else self.disk.as_it_is()
        self._journal.close()
        marks, before, self._lives = self.marks, str(self._folder), self._lives + 1
        found = {name.replace(before, str(self._folder)): data for name, data in found.items()}
        write(found)
        self.disk.sure, self.disk.unsure = found, []
        self._restored = self._open()
        self.states = []
        return survivors(marks, reach(self._journal))

    def reopen(self) -> tuple[LedgerState, float]:
        state, at = self._restored
        assert state is not None, "the first snapshot was synced"
        self._begin(state, at)
        return state, at

    def close(self) -> None:
        self._journal.close()

    @property
    def _folder(self) -> Path:
        return self._root / f"life-{self._lives}"

    def _open(self) -> tuple[LedgerState | None, float]:
        self._journal = Journal(self._folder / "journal.sqlite", EPOCH)
        self._journal._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        restored = self._journal.restore()
        self.marks = [reach(self._journal)]
        return restored

    def _begin(self, state: LedgerState, at: float) -> None:
        self._journal.begin(state, at)
        self.marks.append(reach(self._journal))
        self.states += [b"", encode_state(state)]


def write(files: dict[str, bytes]) -> None:
    """All of them."""
    for name, data in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)


@pytest.fixture
def small_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of seconds meet rounds of pages and snapshots."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_TAIL_BYTES", 20_000)
    monkeypatch.setattr(journal_module, "SNAPSHOT_RATIO", 0)
    monkeypatch.setattr(journal_module, "PAGES_PER_COMMIT", 2)


def reach(journal: Journal) -> tuple[int, int]:
    """How far it goes; grows with every commit."""
    return journal._seq, journal._last_entry


def survivors(marks: list[tuple[int, int]], found: tuple[int, int]) -> int:
    """The number of the newest commit that was found."""
    return max(number for number, mark in enumerate(marks) if mark <= found)


OUTAGE_SHARE = 0.15
"""Of all writes and syncs that are followed by a power cut."""
SEED = 19
POWER_LOSSES = ("managerPowerLoss", "managerPowerLossMidway")


class Outage(NamedTuple):
    """A power cut that could have been."""

    files: dict[str, bytes]
    synced: int
    commits: int
    """At that moment; one more may be on its way."""


class Outages:
    """Notes what some power cuts would leave, while a run goes on."""

    def __init__(self, seed: int) -> None:
        self.disk, self.made = Disk(), list[Outage]()
        self.store: JournalOnDisk | None = None
        self._random = Random(seed)

    def take(self, operation: Operation) -> None:
        self.disk.take(operation)
        if self._random.random() < OUTAGE_SHARE:
            synced, commits = (0, 0) if self.store is None else (self.store.synced, self.store.commits)
            self.made.append(Outage(self.disk.after_power_loss(self._random), synced, commits))


def run_on_disk(schedule: Schedule, root: Path, disk: Disk, outages: Outages | None = None) -> JournalOnDisk:
    """To its end, on real journals; what is asked of the disk is recorded. Raises Violation."""
    stores: list[JournalOnDisk] = []

    def make(state: LedgerState) -> JournalOnDisk:
        stores.append(JournalOnDisk(root, disk, state))
        if outages is not None:
            outages.store = stores[0]
        return stores[0]

    with Recorder(outages.take if outages else disk.take).recording():
        try:
            run_schedule(schedule, make)
        finally:
            stores[0].close()
    return stores[0]


def test_wherever_it_is_cut_off_a_journal_holds_a_prefix_of_commits_with_all_that_were_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_journals: None
) -> None:
    outages = Outages(5)
    store = run_on_disk(replace(draw_schedule(SEED), faults=()), tmp_path, outages.disk, outages)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    before, lost = str(tmp_path / "life-0"), 0
    for number, outage in enumerate(outages.made):
        folder = tmp_path / f"outage-{number}"
        write({name.replace(before, str(folder)): data for name, data in outage.files.items()})
        with closing(Journal(folder / "journal.sqlite", EPOCH)) as journal:
            state, _ = journal.restore()
            found = survivors(store.marks, reach(journal))
        assert outage.synced <= found <= outage.commits + 1
        assert state is not None or not outage.synced
        assert state is None or not lost_by_restart(decode_state(store.states[found]), state)
        lost += found < outage.commits
        shutil.rmtree(folder)
    assert len(outages.made) > 150
    assert lost > 30, "of what was not synced, some is gone"


@pytest.mark.parametrize("seed", range(12))
def test_after_power_losses_the_run_ends_with_no_promise_broken(
    tmp_path: Path, small_journals: None, seed: int
) -> None:
    """Agents and trainer greet a manager whose files are what the power cut left."""
    random, schedule = Random(seed), draw_schedule(seed)
    drawn = [fault for fault in schedule.faults if fault.kind != "journalLoss"]  # its files are what is tried here
    losses = [
        SimulatedFault(
            random.uniform(0.0, 4.0), random.choice(POWER_LOSSES), target=0, seconds=random.uniform(0.1, 1.0)
        )
        for _ in range(8)
    ]
    faults = tuple(sorted((*drawn, *losses), key=lambda fault: fault.at))
    run_on_disk(replace(schedule, faults=faults), tmp_path, Disk())


def test_after_a_sync_that_failed_nothing_is_promised_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have dropped what it could not write, so that a second try would succeed without it."""
    ledger = Ledger(LedgerConfig(run_epoch=EPOCH))
    with closing(Journal(tmp_path / "journal.sqlite", EPOCH)) as journal:
        journal.begin(ledger.state, 0.0)
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", _fail)
            with pytest.raises(RunFailed, match="cannot be written: Input/output error"):
                journal.sync()
        for act in (journal.sync, lambda: journal.commit(ledger.state, 1.0)):
            with pytest.raises(RunFailed, match="cannot be written: Input/output error"):
                act()
        assert not journal.synced


def test_of_two_syncs_at_once_none_takes_what_the_other_lost_for_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greeting syncs on the loop while the disk's thread does: the system tells one of them what it lost."""
    entered, passed = Signal(), Signal()

    def lose_once(descriptor: int) -> None:
        if not entered.is_set():
            entered.set()
            passed.wait(BOTH_AT_ONCE_S)
            _fail(descriptor)

    ledger = Ledger(LedgerConfig(run_epoch=EPOCH))
    with closing(Journal(tmp_path / "journal.sqlite", EPOCH)) as journal, ThreadPoolExecutor() as threads:
        journal.begin(ledger.state, 0.0)
        monkeypatch.setattr(os, "fdatasync", lose_once)
        first = threads.submit(journal.sync)
        assert entered.wait(60.0)
        second = threads.submit(journal.sync)
        second.add_done_callback(lambda _: passed.set())
        for ended in (first, second):
            with pytest.raises(RunFailed, match="cannot be written: Input/output error"):
                ended.result(60.0)
        assert not journal.synced


def _fail(descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


POWERED = """
import signal, sqlite3, sys
from pathlib import Path
from polyrl_rollout.testing.power_loss import PowerSwitch

file = Path(sys.argv[1])
with PowerSwitch(file).armed():
    db = sqlite3.connect(file, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("CREATE TABLE row (number INTEGER)")
    for number in range(40):
        db.execute("INSERT INTO row VALUES (?)", (number,))
        if number == 9:
            db.execute("PRAGMA wal_checkpoint(FULL)")
    print("written", flush=True)
    signal.pause()
    signal.pause()
"""


def test_a_process_whose_power_is_cut_keeps_what_it_synced_and_a_part_of_the_rest(tmp_path: Path) -> None:
    found = []
    for number in range(6):
        file = tmp_path / f"{number}.sqlite"
        process = subprocess.Popen([sys.executable, "-c", POWERED, str(file)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(PowerSwitch.SIGNAL)
        assert process.wait(30) == -signal.SIGKILL
        process.stdout.close()
        with closing(sqlite3.connect(file)) as database:
            found.append([row for (row,) in database.execute("SELECT number FROM row")])
    assert all(rows == list(range(len(rows))) and len(rows) >= 10 for rows in found)
    assert min(map(len, found)) < 40, "of what was not synced, some is gone"
