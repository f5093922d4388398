"""`explain`, `check` and `why` on a journal without its manager: what they tell, and every file that they refuse."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polyrl.ledger.audit.history import HistoryEntry, encode_entry
from polyrl.ledger.events import BatchAcknowledged
from polyrl.ledger.journal import APPLICATION_ID
from polyrl.wire import TrainerHello
from polyrl_cli.app import USER_ERROR, app
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.testing.stage import Stage

EPOCH = 1


@contextmanager
def opened(journal: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(journal)) as db, db:
        yield db


def polyrl(command: str, run: Path, *more: str) -> Result:
    argv = [command, str(run), *more]
    return CliRunner().invoke(app, argv, catch_exceptions=False)


def a_stage() -> Stage:
    """Sample 0.0 moves from a silent engine, is packed for two trainers and trained; 1.0 runs; 2.0 was rejected."""
    stage = Stage()
    stage.engine("a")
    stage.submit(n=2, max_new_tokens=4)
    stage.ask(least=2, most=2)
    stage.tokens("a", stage.number("0.0"), [5, 6])
    stage.now += 3.5
    stage.pass_time(0.0)
    stage.engine("b")
    stage.tokens("b", stage.number("0.0"), [7, 8])
    stage.score("0.0", reward=0.5)
    stage.tokens("b", stage.number("0.1"), [5, 2], "stop")
    stage.score("0.1")
    stage.trainer(TrainerHello(1, -1, trainer="its successor"))
    stage.ask(least=2, most=2)
    stage.acknowledge(1)
    stage.submit(n=1)
    stage.tokens("b", stage.number("1.0"), [5])
    stage.submit(n=2)
    stage.reject("2.0")
    return stage


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose manager has written its journal and is gone."""
    (tmp_path / "job.json").write_text("{}")
    stage = a_stage()
    journal = Journal(tmp_path / "journal.sqlite", EPOCH)
    journal.begin(Stage().ledger.state, 0.0)
    for event in stage.events:
        journal.append([event])
    journal.commit(stage.ledger.state, stage.now)
    journal.close()
    return tmp_path


def test_a_samples_whole_life(run: Path) -> None:
    lines = polyrl("explain", run, "0.0").stdout.splitlines()
    assert lines[0].startswith("sample 0.0, submitted ")
    printed = [line.strip().split("  ", 1)[-1] for line in lines[1:]]
    assert printed == [
        "submitted for step 0 (train) in group 0 of 2: prompt of 10 tokens, at most 4 to generate by version 0",
        "assigned to a, which serves version 0 (assignment 1)",
        "leaves a unfinished (lost) with 2 tokens of version 0 (0..1); waits again",
        "assigned to b, which serves version 0 (assignment 3)",
        "turn ends on b (length) with 2 tokens of version 0 (2..3)",
        "scored: reward 0.5",
        "all samples of group 0 are scored",
        "packed into batch 0",
        "the trainer that had batch 0 is gone, or did not take it; offered again",
        "packed into batch 1",
        "trained: batch 1 is acknowledged",
    ]


def test_a_discarded_sample_names_its_culprit_and_a_live_one_where_it_is(run: Path) -> None:
    assert polyrl("explain", run, "2.0").stdout.splitlines()[-1].endswith("discarded: rewardRaised (said so)")
    sibling = polyrl("explain", run, "2.1").stdout.splitlines()[-1]
    assert sibling.endswith("discarded: groupIncomplete, because sample 2.0 was (rewardRaised: said so)")
    now = polyrl("explain", run, "1.0").stdout.splitlines()[-1]
    assert now.split("  ")[-1].startswith("runs on b for ")
    assert now.endswith("1 tokens so far, 1 of them generated")


@pytest.mark.parametrize("sample", ["9.0", "0.2", "0", "x.y", "", "-1.0", "0.0.0"])
def test_no_such_sample_is_a_sentence_that_names_some(run: Path, sample: str) -> None:
    refused = polyrl("explain", run, "--", sample)
    assert refused.exit_code == USER_ERROR
    assert "samples of this run are 0.0, 0.1, 1.0" in refused.stderr


def test_check_holds_and_says_how_much_it_saw(run: Path) -> None:
    checked = polyrl("check", run)
    assert checked.exit_code == 0, checked.stdout
    assert "I1   holds      every sample ends once" in checked.stdout
    assert checked.stdout.splitlines()[-1] == "nothing is broken"


def test_check_finds_what_is_broken_and_says_the_first(run: Path) -> None:
    entry = HistoryEntry(9.0, BatchAcknowledged(0, 9.0))
    with opened(run / "journal.sqlite") as db:
        db.execute("INSERT INTO history VALUES (?, ?)", (1000, encode_entry(1000, entry)))
    checked = polyrl("check", run)
    assert checked.exit_code == 1
    assert "I3   BROKEN" in checked.stdout
    assert "at 9.000 s: batch 0 is acknowledged, but it was acknowledged or cancelled before" in checked.stdout


def test_why_without_a_manager_says_how_things_stood(run: Path) -> None:
    output = polyrl("why", run).stdout.splitlines()
    assert "the manager does not answer (no runner is at work here); its journal, as of " in output[0]
    assert any("manager waits for tokens of 1 samples from b, for " in line for line in output)


# --- files that are refused -------------------------------------------------------------------------------------------


def foreign(journal: Path) -> None:
    journal.write_text("not a database, though long enough to be one: " * 100)


def of_another_program(journal: Path) -> None:
    with opened(journal) as db:
        db.execute(f"PRAGMA application_id={APPLICATION_ID + 1}")


def of_another_schema(journal: Path) -> None:
    with opened(journal) as db:
        db.execute("PRAGMA user_version=99")


def empty(journal: Path) -> None:
    journal.write_bytes(b"")


def truncated(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[: journal.stat().st_size // 2])


def a_folder(journal: Path) -> None:
    journal.unlink()
    journal.mkdir()


def an_event_changed(journal: Path) -> None:
    with opened(journal) as db:
        db.execute("UPDATE events SET body = CAST(body || x'00' AS BLOB) WHERE seq = (SELECT max(seq) FROM events)")


def an_event_gone(journal: Path) -> None:
    with opened(journal) as db:
        db.execute("INSERT INTO events SELECT seq + 5, at, body, checksum FROM events ORDER BY seq DESC LIMIT 1")


DAMAGES: dict[Callable[[Path], None], str] = {
    foreign: "not a readable journal",
    of_another_program: "is not a PolyRL journal",
    of_another_schema: "is of journal schema 99",
    empty: "is not a PolyRL journal",
    truncated: "not a readable journal: database disk image is malformed",
    a_folder: "there is no journal",
    an_event_changed: "the checksum of row of events",
    an_event_gone: "of the events is missing",
}


def one_sentence(refused: Result, journal: Path) -> str:
    assert refused.exit_code == USER_ERROR, refused.output
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"{journal}: ")
    return line


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", ["check", "why"])
def test_a_journal_that_cannot_be_read_is_refused_in_a_sentence(
    run: Path, damage: Callable[[Path], None], command: str
) -> None:
    damage(run / "journal.sqlite")
    assert DAMAGES[damage] in one_sentence(polyrl(command, run), run / "journal.sqlite")


def test_an_entry_whose_bits_were_flipped_is_refused(run: Path) -> None:
    journal = run / "journal.sqlite"
    with opened(journal) as db:
        number, entry = db.execute(
            "SELECT number, entry FROM history JOIN subjects USING (number) WHERE subject = '0.0' LIMIT 1"
        ).fetchone()
        flipped = bytes([*entry[:-9], entry[-9] ^ 1, *entry[-8:]])
        db.execute("UPDATE history SET entry = ? WHERE number = ?", (flipped, number))
    for command, more in (("check", ()), ("explain", ("0.0",))):
        refused = one_sentence(polyrl(command, run, *more), journal)
        assert f"the checksum of entry {number} of the history does not match" in refused


def damaged_copies(journal: Path, count: int, seed: int) -> Iterator[int]:
    whole, draw = journal.read_bytes(), random.Random(seed)
    for _ in range(count):
        at = draw.randrange(100, len(whole))
        journal.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :])
        yield at
    journal.write_bytes(whole)


def test_any_flipped_bit_is_refused_or_changes_nothing(run: Path, seed: int) -> None:
    """A bit that no row uses may flip unseen; one that a row uses is never passed on as history."""
    journal = run / "journal.sqlite"
    honest, refused = polyrl("check", run).stdout, 0
    for at in damaged_copies(journal, 300, seed):
        checked = polyrl("check", run)
        if checked.stdout == honest and checked.exit_code == 0:
            continue
        refused += 1
        one_sentence(checked, journal)
        assert "Traceback" not in checked.stderr, f"bit in byte {at}"
    assert refused > 0


def test_a_folder_without_a_run_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for argv, words in (
        (["check", "nowhere"], "nowhere: no run lies there"),
        (["why"], "runs: no run lies there; name the folder of one"),
        (["chaos", "kill", "nowhere"], "nowhere: no run lies there"),
    ):
        refused = CliRunner().invoke(app, argv, catch_exceptions=False)
        assert refused.exit_code == USER_ERROR
        assert words in refused.stderr


def test_the_newest_run_is_meant_when_none_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "new").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert polyrl("check", run).stdout.splitlines()[1:] == CliRunner().invoke(app, ["check"]).stdout.splitlines()[1:]
