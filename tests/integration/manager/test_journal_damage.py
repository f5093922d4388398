"""Journals that are damaged, foreign or cut: refused with one sentence and left as they are, never read in part."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polyrl.errors import InvalidData, RunFailed
from polyrl.ledger.journal import JOURNAL_SCHEMA, decode_state, encode_state
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.testing.simulation.manager import lost_by_restart
from polyrl_rollout.testing.stage import Stage

EPOCH = 1
TOKENS = list(range(5000, 5090))
MARK = TOKENS[40].to_bytes(4, "little") + TOKENS[41].to_bytes(4, "little")
"""Bytes that occur in the file only where tokens lie."""

PAGE_BYTES = 4096


def write_run(path: Path) -> list[bytes]:
    """A run of several commits, with its samples half way; gives the state after each commit."""
    stage = Stage()
    journal = Journal(path, EPOCH)
    journal.restore()
    journal.begin(stage.ledger.state, stage.now)
    states = [encode_state(stage.ledger.state)]

    def commit(before: int) -> None:
        journal.append(stage.events[before:])
        journal.commit(stage.ledger.state, stage.now)
        states.append(encode_state(stage.ledger.state))

    acts: list[Callable[[], object]] = [lambda: stage.engine("a"), lambda: stage.submit(2, 2)]
    for act in acts + [lambda: grow(stage)] * 20:
        before = len(stage.events)
        stage.now += 0.01
        act()
        commit(before)
    journal.close()
    return states


def grow(stage: Stage) -> None:
    for number, assignment in tuple(stage.ledger.state.assignments.items()):
        begin = assignment.length
        stage.tokens("a", number, TOKENS[begin : begin + 4])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_run(tmp_path / "journal.sqlite")
    return tmp_path / "journal.sqlite"


def restored(path: Path, run_epoch: int = EPOCH) -> bytes:
    """The state that a manager would go on with."""
    journal = Journal(path, run_epoch)
    try:
        state, _ = journal.restore()
        return b"" if state is None else encode_state(state)
    finally:
        journal.close()


def flip_a_token(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(MARK)] ^= 1
    path.write_bytes(data)


def zero_a_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    begin = data.rindex(MARK) // PAGE_BYTES * PAGE_BYTES
    data[begin : begin + PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(data)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    other.close()


def not_a_database(path: Path) -> None:
    path.write_text("time,reward\n1,0.5\n" * 500)


def alter(*statements: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        with sqlite3.connect(path) as journal:
            for statement in statements:
                journal.execute(statement)
        journal.close()

    edit.__name__ = statements[0]
    return edit


DAMAGES = [
    (flip_a_token, "the journal is damaged and cannot be replayed: the checksum of row of events"),
    (zero_a_page, "the journal is damaged and cannot be replayed"),
    (halve, "malformed"),
    (other_database, "is not a PolyRL journal"),
    (not_a_database, "not a usable journal: file is not a database"),
    (alter(f"PRAGMA user_version = {JOURNAL_SCHEMA + 1}"), f"to {JOURNAL_SCHEMA}"),
    (alter("DELETE FROM events WHERE seq = 7"), "row 7 of the events is missing"),
    (alter("UPDATE events SET seq = -seq WHERE seq IN (7, 8)"), "row 1 of the events is missing"),
    (alter("DELETE FROM snapshot"), "events without a snapshot"),
    (alter("UPDATE snapshot SET body = x'c0'"), "the checksum of snapshot 0 does not match"),
    (alter("DROP TABLE events"), "has other tables than a journal"),
    (alter("DELETE FROM meta"), "holds run epoch None, this is epoch 1"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES, ids=[damage.__name__[:40] for damage, _ in DAMAGES])
def test_damage_is_refused_and_the_file_left_alone(path: Path, damage: Callable[[Path], None], sentence: str) -> None:
    whole = restored(path)
    shutil.copy(path, path.with_name("good"))
    damage(path)
    before = path.read_bytes()
    with pytest.raises((InvalidData, RunFailed)) as refused:
        restored(path)
    assert str(path) in str(refused.value)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before
    shutil.copy(path.with_name("good"), path)
    assert restored(path) == whole, "once the file is whole again, so is the state"


def test_any_flipped_bit_is_refused_or_changes_nothing(path: Path) -> None:
    """One byte after another through the file: the state is the whole one, or there is none."""
    whole, data = restored(path), path.read_bytes()
    refused = 0
    for place in range(0, len(data), 89):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        try:
            assert restored(path) == whole, f"byte {place} was read as something else"
        except (InvalidData, RunFailed):
            refused += 1
    assert refused > 20


def test_a_journal_of_another_epoch_is_refused(path: Path) -> None:
    with pytest.raises(InvalidData, match="holds run epoch 1, this is epoch 2"):
        restored(path, 2)


def test_a_cut_log_gives_the_state_after_some_commit(tmp_path: Path) -> None:
    """The machine lost power: what the log (WAL) holds to its first torn frame is a prefix of whole commits."""
    crash = f"""
import importlib.util, os, pathlib
spec = importlib.util.spec_from_file_location("damage", {__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.Journal.close = lambda self: os._exit(0)
module.write_run(pathlib.Path({str(tmp_path / "journal.sqlite")!r}))
"""
    subprocess.run([sys.executable, "-c", crash], check=True, timeout=60)
    states = [decode_state(state) for state in write_run(tmp_path / "again.sqlite")]
    main, log = tmp_path / "journal.sqlite", tmp_path / "journal.sqlite-wal"
    kept, data = main.read_bytes(), log.read_bytes()
    reached = set()
    for size in (*range(0, len(data), len(data) // 40), len(data)):
        main.write_bytes(kept)
        log.write_bytes(data[:size])
        main.with_name("journal.sqlite-shm").unlink(missing_ok=True)
        found = restored(main)
        same = [
            number
            for number, state in enumerate(states, 1)
            if found and not lost_by_restart(state, decode_state(found))
        ]
        assert same or not found, f"a log of {size} bytes gives a state that never was"
        reached.add(max(same, default=0))
    assert max(reached) == len(states)
    assert len(reached) > 5
