"""What a restart reads follows what lives, not what has been: snapshots and pages take the place of events."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from polyrl.ledger.apply import samples
from polyrl.wire import Batch
from polyrl_rollout.manager import journal as journal_module
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.testing.stage import Stage, sent

TAIL_BYTES = 30_000
STEPS = 120
READ = """SELECT (SELECT coalesce(sum(length(body)), 0) FROM events)
    + (SELECT coalesce(sum(length(body)), 0) FROM pages)
    + (SELECT length(body) FROM snapshot)"""


class Recorded:
    """A hand-driven ledger with a journal."""

    def __init__(self, path: Path) -> None:
        self.stage = Stage()
        self.stage.engine("a", max_running=64)
        self.journal = Journal(path, 1)
        self.journal.restore()
        self.journal.begin(self.stage.ledger.state, 0.0)
        self._path, self._kept = path, len(self.stage.events)

    def commit(self) -> None:
        self.journal.append(self.stage.events[self._kept :])
        self._kept = len(self.stage.events)
        self.journal.commit(self.stage.ledger.state, self.stage.now)

    def train(self, groups: int) -> None:
        """So many groups are generated, scored, packed and acknowledged."""
        self.stage.submit(groups, 2)
        self.commit()
        for _ in range(5):
            for number, assignment in tuple(self.stage.ledger.state.assignments.items()):
                self.stage.tokens(assignment.engine, number, [5, 6, 7, 8])
            self.commit()
        self.stage.finish_all()
        (batch,) = sent(self.stage.ask(most=99), Batch)
        self.stage.acknowledge(batch.number)
        self.commit()

    def read_bytes(self) -> int:
        """What a restart would read now."""
        with sqlite3.connect(self._path) as other:
            (size,) = other.execute(READ).fetchone()
        other.close()
        return int(size)


def test_a_restart_reads_what_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SNAPSHOT_TAIL_BYTES", TAIL_BYTES)
    monkeypatch.setattr(samples, "ENDED_MEMORY", 64)  # digests of ended groups: bounded, and full early
    run = Recorded(tmp_path / "journal.sqlite")
    sizes = []
    for _ in range(STEPS):
        run.train(6)
        sizes.append(run.read_bytes())
    written = run.stage.ledger.state.counters.tokens_accepted * 8
    run.journal.close()
    early, late = max(sizes[: STEPS // 4]), max(sizes[-STEPS // 4 :])
    print(f"read at most {early} bytes early, {late} late; {written} bytes of tokens were accepted")
    assert late <= 1.3 * early
    assert late < written / 2
    again = Journal(tmp_path / "journal.sqlite", 1)
    state, _ = again.restore()
    again.close()
    assert state is not None
    assert state.counters.acknowledged == STEPS * 12
    assert not state.samples
