"""`polyrl check [RUN]`: the invariants of a run, from its journals alone; the first broken event of each.

A resumed run has a journal per epoch, and each is audited on its own: an epoch's samples never reach the next one.
The invariants are in `polyrl.ledger.audit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from polyrl.ledger.audit.audit import Audit
from polyrl.ledger.audit.findings import Verdict
from polyrl_cli.inspection.journal_reader import open_journal
from polyrl_cli.local.run_folder import find_run

VERDICT_WIDTH: Final = 9
"""Width of the longest verdict, `not shown`."""


def check_lines(run: Path | None) -> tuple[list[str], bool]:
    """The verdicts, and whether nothing is broken."""
    folder = find_run(run)
    lines, broken = [], 0
    for path in [*folder.older_journals(), folder.journal]:
        verdicts = audit_journal(path)
        lines += [f"{path}:", *(line for verdict in verdicts for line in _lines_of(verdict))]
        broken += sum(1 for verdict in verdicts if verdict.broken)
    lines.append(f"{broken} broken" if broken else "nothing is broken")
    return lines, not broken


def audit_journal(path: Path) -> list[Verdict]:
    """One verdict per invariant."""
    audit = Audit()
    with open_journal(path) as journal:
        for entry in journal.history():
            audit.take(entry)
        replayed = journal.replay()
    return audit.conclude(None if replayed is None else replayed.state)


def _lines_of(verdict: Verdict) -> Iterator[str]:
    word = "BROKEN" if verdict.broken else "holds" if verdict.examined else "not shown"
    examined = ", ".join(f"{count:,} {what}" for what, count in verdict.examined.items())
    yield f"  {verdict.invariant:<3}  {word:<{VERDICT_WIDTH}}  {verdict.title}{f' ({examined})' if examined else ''}"
    if verdict.broken:
        more = f" (the first of {verdict.broken:,})" if verdict.broken > 1 else ""
        yield f"{'':>{VERDICT_WIDTH}}{verdict.first}{more}"
    elif not verdict.examined:
        yield f"{'':>{VERDICT_WIDTH}}{verdict.first}"
