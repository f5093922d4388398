"""A journal that somebody made to hurt its reader is refused in a sentence, soon; `why` speaks with nobody it names."""

import fcntl
import json
import os
import socket
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from polyrl.errors import InvalidData, PolyRLError, UserError
from polyrl.ledger import LedgerConfig, journal as form
from polyrl.ledger.audit.history import HistoryEntry, ManagerStarted
from polyrl.manifest.job import PolyRLJob
from polyrl.testing.job_values import raw_job
from polyrl_cli.app import app
from polyrl_cli.inspection import journal_reader
from polyrl_cli.inspection.check import check_lines
from polyrl_cli.inspection.explain import explain_lines
from polyrl_cli.inspection.journal_reader import JournalReader, open_journal
from polyrl_cli.inspection.why import why_lines
from polyrl_cli.page.page import write_page
from polyrl_operator.secret import make_certificate, write_run_keys

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS number, x'00' AS entry FROM n"
DEADLINE_S = 5.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "received"
    root.mkdir()
    (root / "job.json").write_text("{}")
    with sqlite3.connect(root / "journal.sqlite", isolation_level=None) as db:
        db.executescript(form.create_script(1))
    db.close()
    return root


def change(run: Path, script: str) -> None:
    db = sqlite3.connect(run / "journal.sqlite", isolation_level=None)
    db.executescript(script)
    db.close()


@pytest.mark.parametrize("script", [
    f"DROP TABLE history; CREATE VIEW history AS {ENDLESS}",
    "DROP TABLE history; CREATE VIEW history AS SELECT number, randomblob(1000000000) AS entry FROM subjects",
    "DROP TABLE events; CREATE TABLE events (seq, at, body AS (zeroblob(1000000000)), checksum)",
    "CREATE TRIGGER t AFTER INSERT ON history BEGIN DELETE FROM history; END",
    "CREATE VIEW another AS SELECT 1",
    "DROP TABLE meta",
])  # fmt: skip
@pytest.mark.parametrize("command", [check_lines, why_lines, lambda run: explain_lines(run, "1.0")])
def test_a_file_with_other_tables_is_refused_soon(run: Path, script: str, command: Callable[[Path], object]) -> None:
    change(run, script)
    began = time.monotonic()
    with pytest.raises(InvalidData, match="has other tables than a journal"):
        command(run)
    assert time.monotonic() - began < DEADLINE_S


@pytest.mark.parametrize("command", [check_lines, lambda run: explain_lines(run, "1.0")])
def test_a_journal_of_a_terabyte_without_content_is_one_sentence(run: Path, command: Callable[[Path], object]) -> None:
    """A traceback of `check` and `explain`: its size is no number of SQLite's."""
    (run / "journal.sqlite").write_bytes(b"")
    os.truncate(run / "journal.sqlite", 1 << 40)
    with pytest.raises(PolyRLError, match=r"journal\.sqlite"):
        command(run)


def test_a_query_ends_when_it_takes_more_than_its_file_can_need(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(run, f"DROP TABLE history; CREATE VIEW history AS {ENDLESS}")
    monkeypatch.setattr(form, "foreign", lambda db: "")
    monkeypatch.setattr(journal_reader, "FREE_STEPS", 1_000_000)
    monkeypatch.setattr(journal_reader.JournalReader, "_decode", lambda self, row: row)
    with open_journal(run / "journal.sqlite") as journal, pytest.raises(InvalidData, match="interrupted"):
        for _ in journal.history():
            pass


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({}, id="lacks a field"),
        pytest.param({"assignments": {"a": [1]}, "groups": {}, "queue": [], "engines": {}}, id="a short row"),
        pytest.param({"assignments": [], "groups": {}}, id="a list for a map"),
    ],
)
def test_an_older_journal_that_cannot_be_brought_forward_is_damaged(run: Path, state: object) -> None:
    """Its reader ended with a traceback."""
    change(run, f"PRAGMA user_version={form.OLDEST_SCHEMA}")
    with sqlite3.connect(run / "journal.sqlite") as db:
        row = form.row(1, 0.0, msgspec.msgpack.encode(state))
        db.execute(form.REPLACE_SNAPSHOT, (*row, 0))
    db.close()
    with pytest.raises(InvalidData, match="the journal is damaged"):
        check_lines(run)


def branch(size: int, child: int, begin: int = 0) -> bytearray:
    """A page of a table's tree that leads to another one 300 times."""
    count, page, at = 300, bytearray(size), size - 5 * 300
    page[begin : begin + 12] = struct.pack(">BHHHBI", 5, 0, count, at, 0, child)
    places = range(at, size, 5)
    page[begin + 12 : begin + 12 + 2 * count] = struct.pack(f">{count}H", *places)
    for place in places:
        page[place : place + 5] = struct.pack(">IB", child, 1)
    return page


def plant_tree(file: Path, root: int, levels: int = 8) -> None:
    """Has the table of that root consist of 300**levels rows, in a few pages that lead to each other."""
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    pages = [data[begin : begin + size] for begin in range(0, len(data), size)]
    begin = 100 if root == 1 else 0  # behind the file's own head
    leaf = bytearray(pages[root - 1])
    head = 8 + 2 * int.from_bytes(leaf[begin + 3 : begin + 5], "big")
    leaf[:head] = leaf[begin : begin + head]
    fresh = branch(size, len(pages) + 1, begin)
    pages[root - 1] = pages[root - 1][:begin] + fresh[begin:]
    for _ in range(levels - 1):
        pages.append(branch(size, len(pages) + 2))
    pages.append(leaf)
    written = bytearray(b"".join(pages))
    written[28:32], written[92:96] = len(pages).to_bytes(4, "big"), written[24:28]
    file.write_bytes(written)


@pytest.mark.parametrize("table", ["history", "sqlite_master"])
def test_pages_that_lead_to_each_other_end_soon_before_a_journal_is_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """An older journal's, and the list of tables itself, were gone through without an end."""
    change(run, f"INSERT INTO history VALUES (1, x'00'); PRAGMA user_version={form.OLDEST_SCHEMA}")
    with sqlite3.connect(run / "journal.sqlite") as db:
        found = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    db.close()
    plant_tree(run / "journal.sqlite", found[0] if found else 1)
    monkeypatch.setattr(journal_reader, "FREE_STEPS", 1_000_000)
    began = time.monotonic()
    with pytest.raises(InvalidData, match=r"damaged|not a readable journal"):
        check_lines(run)
    assert time.monotonic() - began < DEADLINE_S


def test_a_value_is_never_longer_than_the_file(run: Path) -> None:
    with open_journal(run / "journal.sqlite") as journal, pytest.raises(InvalidData, match="too big"):
        list(journal._rows("SELECT zeroblob(100000000)"))


def test_files_of_odd_names_are_passed_over(run: Path) -> None:
    for name in ("x", "", "-1", "1e9", "9" * 200):
        (run / f"journal-of-epoch-{name}.sqlite").write_text("odd")
    with pytest.raises(PolyRLError, match=r"no sample 1\.0"):
        explain_lines(run, "1.0")


@pytest.mark.parametrize("name", ["journal.sqlite", "metrics.jsonl", "fleet.jsonl", "summary.json", "job.json"])
def test_a_link_in_place_of_a_file_is_not_read(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("of this account\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=rf"{name}: a link or a pipe"):
        why_lines(run)


def test_a_page_is_not_written_through_a_link(run: Path, tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("mine")
    for name in ("report.html", ".report.html.partial"):
        (run / name).symlink_to(victim)
    write_page(run / "report.html", "the page")
    assert (victim.read_text(), (run / "report.html").read_text()) == ("mine", "the page")


@dataclass
class Trap:
    """A folder that names an address of somebody else's, and looks as if a runner were at work in it."""

    run: Path
    listener: socket.socket
    host: str = "127.0.0.1"

    def lay(self) -> None:
        (self.run / "run" / "endpoints").mkdir(parents=True)
        write_run_keys(self.run / "keys")
        (self.run / "keys" / "ca.crt").write_bytes(make_certificate(["localhost"]).authority)
        ends = {"agents": "tcp://127.0.0.1:1", "trainer": "tcp://127.0.0.1:1", "publicKey": "k" * 40, "epoch": 1}
        ends |= {"http": f"http://{self.host}:{self.listener.getsockname()[1]}", "pid": 1}
        (self.run / "run" / "endpoints" / "manager.json").write_text(json.dumps(ends))

    @property
    def key(self) -> Path:
        return self.run / "keys" / "operator.key"

    @contextmanager
    def runner(self) -> Iterator[None]:
        """Whoever holds the lock looks like one."""
        with (self.run / "run" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_spoken_to(self) -> bool:
        try:
            self.listener.accept()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def trap(run: Path) -> Iterator[Trap]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield Trap(run, listener)


def test_why_speaks_with_no_address_of_a_received_folder(trap: Trap) -> None:
    trap.lay()
    assert "no runner is at work here" in why_lines(trap.run)[0]
    assert not trap.is_spoken_to()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("a link for a key", "operator.key: a link"),
        ("another account", "not to you"),
        ("another machine", "names 192.0.2.1, which is not this machine"),
    ],
)
@pytest.mark.parametrize("command", ["why", "top"])
def test_a_token_is_handed_to_nobody_else(
    trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str, sentence: str
) -> None:
    """With a lock of the sender's own, and a link to the key of another run, `why` gave that run's token away."""
    if kind == "another machine":
        trap.host = "192.0.2.1"
    trap.lay()
    if kind == "a link for a key":
        trap.key.rename(tmp_path / "other.key")
        trap.key.symlink_to(tmp_path / "other.key")
    if kind == "another account":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with trap.runner():
        if command == "why":
            assert sentence in why_lines(trap.run)[0]
        else:
            job = PolyRLJob.model_validate(raw_job()).model_dump_json(by_alias=True, exclude_none=True)
            (trap.run / "job.json").write_text(job)
            shown = CliRunner().invoke(app, ["top", str(trap.run), "--once"], env={"COLUMNS": "400"})
            assert shown.exit_code == 0
    assert not trap.is_spoken_to()


@pytest.mark.parametrize("unix_s", [1e300, float("nan"), float("inf"), -1e12])
def test_a_moment_that_is_none_is_shown_as_such(run: Path, monkeypatch: pytest.MonkeyPatch, unix_s: float) -> None:
    started = HistoryEntry(0.0, ManagerStarted(unix_s, LedgerConfig(run_epoch=1)))
    monkeypatch.setattr(JournalReader, "history_of", lambda reader, kind: [started])
    with open_journal(run / "journal.sqlite") as journal:
        assert journal.moment_text(1.0) == "no time of any clock"
