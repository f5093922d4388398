"""A manager of a later version takes a run over: journals of every earlier schema, and two versions of the code.

`journals/` holds one journal per earlier schema, written by the code of that schema (`journals/write.py`).
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from polyrl.ledger import Ledger
from polyrl.ledger.audit.audit import Audit
from polyrl.ledger.journal import JOURNAL_SCHEMA, OLDEST_SCHEMA
from polyrl.ledger.state import LedgerState, SamplePhase
from polyrl.wire import Batch, TrainerHello
from polyrl_cli.inspection.journal_reader import open_journal
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.testing.stage import Stage, sent

JOURNALS = Path(__file__).with_name("journals")
EPOCH = 1
SCHEMAS = range(OLDEST_SCHEMA, JOURNAL_SCHEMA)
PHASES = {
    **dict.fromkeys(("1.0", "1.1"), SamplePhase.PACKED),
    **dict.fromkeys(("2.0", "2.1"), SamplePhase.SCORED),
    "3.0": SamplePhase.TURN_DONE,
    "3.1": SamplePhase.ASSIGNED,
    **dict.fromkeys(("5.0", "5.1"), SamplePhase.ASSIGNED),
    **dict.fromkeys(("6.0", "6.1"), SamplePhase.WAITING),
}


@pytest.fixture(params=SCHEMAS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A journal of that schema; one of each must have been kept."""
    path = tmp_path / "journal.sqlite"
    shutil.copyfile(JOURNALS / f"schema-{request.param}.sqlite", path)
    return path


@pytest.fixture
def taken_over(old: Path) -> Iterator[tuple[Journal, LedgerState, float]]:
    with closing(Journal(old, EPOCH)) as journal:
        state, at = journal.restore()
        assert state is not None
        yield journal, state, at


def test_everything_is_where_it_was(taken_over: tuple[Journal, LedgerState, float]) -> None:
    _, state, _ = taken_over
    assert {name: sample.phase for name, sample in state.samples.items()} == PHASES
    tokens = [*range(1000, 1036)]
    for name in ("1.0", "2.1", "3.1", "5.0"):
        assert list(memoryview(state.samples[name].ids).cast("I"))[:36] == tokens
    assert (state.counters.submitted, state.counters.acknowledged) == (14, 2)


def test_the_run_goes_on_to_its_end_and_nothing_is_broken(
    taken_over: tuple[Journal, LedgerState, float], old: Path
) -> None:
    journal, state, at = taken_over
    stage = Stage()
    stage.ledger, stage.now, stage.events = Ledger(state.config, state), at, []
    stage._request = 10_000
    journal.begin(state, at)
    stage._keep(stage.ledger.resume(stage.now))
    stage.trainer(TrainerHello(1, 0, "another"))
    for name in "abc":
        stage.engine(name, max_running=4)
    stage.publish(9)
    stage.engine("d", version=9)
    for _ in range(20):
        for number, assignment in tuple(stage.ledger.state.assignments.items()):
            version = stage.ledger.state.engines[assignment.engine].version
            stage.tokens(assignment.engine, number, [5, 2], "stop", version=version)
        for name in tuple(stage.ledger.state.awaiting_verdict):
            stage.score(name, turn=stage.ledger.state.samples[name].turn)
        for batch in sent(stage.ask(), Batch):
            stage.acknowledge(batch.number)
        stage.pass_time_heard(1.0)
    counters = stage.ledger.state.counters
    assert not stage.ledger.state.samples
    assert counters.acknowledged + sum(counters.discarded.values()) == counters.submitted == 14
    journal.append(stage.events)
    journal.commit(stage.ledger.state, stage.now)
    audit = Audit()
    with open_journal(old) as reader:
        for entry in reader.history():
            audit.take(entry)
        assert [verdict.first for verdict in audit.conclude(stage.ledger.state) if verdict.broken] == []


def test_it_is_read_without_being_changed(old: Path) -> None:
    before = old.read_bytes()
    with open_journal(old) as reader:
        replayed = reader.replay()
        assert replayed is not None
        assert set(replayed.state.samples) == set(PHASES)
        assert len(list(reader.history())) > 50
    assert old.read_bytes() == before


def test_it_is_of_this_schema_once_a_manager_has_opened_it(old: Path) -> None:
    for _ in range(2):
        with closing(Journal(old, EPOCH)) as journal:
            assert journal.restore()[0] is not None
    with closing(sqlite3.connect(old)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (JOURNAL_SCHEMA,)
