"""Runs in a pod, beside a job's two volumes: prints the audit of its journal and what it took, as one JSON line.

Refuses to judge: the tests do. Read next: `audit`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyrl.ledger.audit import records as r
from polyrl_cli.inspection.check import audit_journal
from polyrl_cli.inspection.journal_reader import open_journal

JOURNAL = Path("/polyrl/journal/journal.sqlite")
RESULT = Path("/polyrl/run/trainer-result.json")


def main() -> None:
    """Prints the report."""
    with open_journal(JOURNAL) as journal:
        records = list(journal.records())
        replayed = journal.replay()
    assert replayed is not None, "a job that is over has samples"
    verdicts = [{"invariant": v.invariant, "broken": v.broken, "first": v.first} for v in audit_journal(JOURNAL)]
    report = {
        "verdicts": verdicts,
        "samples": count_samples(records),
        "engines": engine_times(records),
        "moves": move_times(records),
        "tokensAgain": replayed.state.counters.tokens_in_vain,
        "result": json.loads(RESULT.read_text()) if RESULT.exists() else None,
    }
    print(json.dumps(report))


def count_samples(records: list[r.AnyRecord]) -> dict[str, Any]:
    """Samples submitted, acknowledged, and discarded by reason."""
    sizes = {one.group: one.n for one in records if isinstance(one, r.Submitted)}
    batches = {one.batch: one.groups for one in records if isinstance(one, r.Batched)}
    acknowledged = [g for one in records if isinstance(one, r.Acknowledged) for g in batches[one.batch]]
    reasons: Counter[str] = Counter()
    for one in records:
        if isinstance(one, r.Discarded):
            reasons[one.reason] += sizes[one.group]
    return {
        "submitted": sum(sizes.values()),
        "acknowledged": sum(sizes[group] for group in acknowledged),
        "discarded": dict(reasons),
        "twice": [group for group, times in Counter(acknowledged).items() if times > 1],
    }


def in_unix_seconds(records: list[r.AnyRecord]) -> Iterator[tuple[r.AnyRecord, float]]:
    """Each record with the Unix seconds of its ledger's zero; the ledger's clock stands while no manager runs."""
    wall = 0.0
    for one in records:
        wall = one.wall - one.at if isinstance(one, r.Began) else wall
        yield one, wall


def engine_times(records: list[r.AnyRecord]) -> list[dict[str, Any]]:
    """What befell engines, in Unix seconds."""
    told: list[dict[str, Any]] = []
    for one, wall in in_unix_seconds(records):
        if isinstance(one, r.Greeted | r.Draining | r.Gone):
            cause = getattr(one, "reason", getattr(one, "cause", ""))
            told.append({"what": type(one).__name__, "engine": one.engine, "at": one.at + wall, "cause": cause})
            told[-1] |= {"heardAt": one.heard_at + wall} if isinstance(one, r.Gone) else {}
    return told


def move_times(records: list[r.AnyRecord]) -> list[dict[str, Any]]:
    """Of each sample that moved: from which engine when, and when it was given to which other one."""
    waiting: dict[str, dict[str, Any]] = {}
    moves = []
    for one, wall in in_unix_seconds(records):
        if isinstance(one, r.Moved):
            tokens = sum(end - start for start, end, _ in one.pieces)
            waiting[one.sample] = {"from": one.engine, "at": one.at + wall, "cause": one.cause, "tokens": tokens}
        elif isinstance(one, r.Assigned) and one.sample in waiting:
            moves.append(waiting.pop(one.sample) | {"to": one.engine, "againAt": one.at + wall})
    return moves


if __name__ == "__main__":
    main()
