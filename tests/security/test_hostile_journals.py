"""A journal that somebody made to hurt its reader is refused in a sentence, soon; `why` speaks with nobody it names."""

import json
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polyrl.errors import InvalidData, PolyRLError, UserError
from polyrl.ledger import journal as form
from polyrl_cli.inspection import journal_reader
from polyrl_cli.inspection.check import check_lines
from polyrl_cli.inspection.explain import explain_lines
from polyrl_cli.inspection.journal_reader import open_journal
from polyrl_cli.inspection.why import why_lines
from polyrl_cli.page.page import write_page

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


def test_a_query_ends_when_it_takes_more_than_its_file_can_need(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(run, f"DROP TABLE history; CREATE VIEW history AS {ENDLESS}")
    monkeypatch.setattr(form, "foreign", lambda db: "")
    monkeypatch.setattr(journal_reader, "FREE_STEPS", 1_000_000)
    monkeypatch.setattr(journal_reader.JournalReader, "_decode", lambda self, row: row)
    with open_journal(run / "journal.sqlite") as journal, pytest.raises(InvalidData, match="interrupted"):
        for _ in journal.history():
            pass


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


def test_why_speaks_with_no_address_of_a_received_folder(run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        (run / "run" / "endpoints").mkdir(parents=True)
        (run / "keys").mkdir(mode=0o700)
        (run / "keys" / "operator.key").write_text(json.dumps({"httpToken": "t" * 40}))
        (run / "keys" / "operator.key").chmod(0o600)
        ends = {"agents": "tcp://127.0.0.1:1", "trainer": "tcp://127.0.0.1:1", "publicKey": "k" * 40, "runEpoch": 1}
        ends |= {"http": f"http://127.0.0.1:{listener.getsockname()[1]}", "pid": 1}
        (run / "run" / "endpoints" / "manager.json").write_text(json.dumps(ends))
        assert "no runner is at work here" in why_lines(run)[0]
        with pytest.raises(BlockingIOError):
            listener.accept()
