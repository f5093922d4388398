"""Writes the journal that tests keep of each schema: a run in which samples are in every phase, some of it in pages.

To be run with the code of that schema, from an empty folder CODE, and only once for each:

    git archive COMMIT | tar -x -C CODE
    cd CODE && PYTHONPATH=core:rollout python .../journals/write.py .../journals/schema-8.sqlite
"""

from __future__ import annotations

import sys
from pathlib import Path

from polyrl.ledger import events
from polyrl.ledger.apply import apply
from polyrl.ledger.causes import MoveCause, QuarantineCause
from polyrl_rollout.manager import journal as module
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.testing.stage import Stage

EPOCH = 1


class Written:
    """A stage whose events go into a journal as they happen."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path, EPOCH)
        self.journal.restore()
        self._written = 0
        begun = Stage()
        self.stage = Stage()
        self.journal.begin(type(begun.ledger.state)(begun.ledger.state.config), 0.0)

    def commit(self) -> None:
        stage = self.stage
        self.journal.append(stage.events[self._written :])
        self._written = len(stage.events)
        stage.now += 0.01
        self.journal.commit(stage.ledger.state, stage.now)


def write(path: Path) -> None:
    """Groups: 0 acknowledged, 1 packed, 2 scored, 3 one turn done and one extended, 4 discarded, 5 runs, 6 waits."""
    module.SNAPSHOT_TAIL_BYTES, module.SNAPSHOT_RATIO = 1500, 0
    run = Written(path)
    stage = run.stage
    for name in "abc":
        stage.engine(name, max_running=4)
        run.commit()
    stage.submit(6, 2)
    run.commit()
    for _ in range(12):
        for number, assignment in tuple(stage.ledger.state.assignments.items()):
            stage.tokens(assignment.engine, number, [1000 + assignment.length + index for index in range(3)])
            run.commit()
    for group in range(4):
        for index in range(2):
            finish(run, f"{group}.{index}")
    for group in range(3):
        for index in range(2):
            stage.score(f"{group}.{index}")
            run.commit()
    stage.extend("3.1", [7, 7, 7])
    for _ in range(2):
        stage.ask(most=2)
        run.commit()
    stage.acknowledge(0)
    stage.reject("4.0")
    run.commit()
    pause_a_straggler(stage)
    stage.submit(1, 2, min_version=9, max_version=9)
    run.commit()
    run.journal.close()


def finish(run: Written, sample: str) -> None:
    """Its engine ends its turn."""
    stage = run.stage
    number = stage.number(sample)
    stage.tokens(stage.ledger.state.assignments[number].engine, number, [5, 2], "stop")
    run.commit()


def pause_a_straggler(stage: Stage) -> None:
    """What schema 8 knew, and no later one does."""
    causes = QuarantineCause
    if hasattr(causes, "STRAGGLER"):
        for event in (
            events.EngineQuarantined("b", 30.0, causes.STRAGGLER, stage.now),
            events.EngineRestored("b", events.RestoreCause.PROVEN, stage.now),
            events.Moved(stage.number("5.1"), MoveCause.STRAGGLER, stage.now),
        ):
            stage.events.append(event)
            apply(stage.ledger.state, event)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
