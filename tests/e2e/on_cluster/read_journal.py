"""Runs in a pod, beside a job's two volumes: prints the audit of its journal and what it took, as one JSON line.

The tests judge it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyrl.ledger import events as f
from polyrl.ledger.audit.history import AssignmentTokens, HistoryEntry, ManagerStarted
from polyrl_cli.inspection.check import audit_journal
from polyrl_cli.inspection.journal_reader import open_journal

JOURNAL = Path("/polyrl/journal/journal.sqlite")
RESULT = Path("/polyrl/run/trainer-result.json")


def main() -> None:
    """Prints the report."""
    with open_journal(JOURNAL) as journal:
        history = list(journal.history())
        replayed = journal.replay()
    assert replayed is not None, "a job that is over has samples"
    verdicts = [{"invariant": v.invariant, "broken": v.broken, "first": v.first} for v in audit_journal(JOURNAL)]
    report = {
        "verdicts": verdicts,
        "samples": count_samples(history),
        "engines": engine_times(history),
        "moves": move_times(history),
        "tokensAgain": replayed.state.counters.tokens_in_vain,
        "result": json.loads(RESULT.read_text()) if RESULT.exists() else None,
    }
    print(json.dumps(report))


def count_samples(history: list[HistoryEntry]) -> dict[str, Any]:
    """Samples submitted, acknowledged, and discarded by reason. One that was acknowledged and then offered again, to a
    trainer whose checkpoint does not contain it, had not ended by that."""
    events = [entry.event for entry in history]
    sizes = {event.group.id: event.group.n for event in events if isinstance(event, f.GroupSubmitted)}
    batches = {event.batch: event.groups for event in events if isinstance(event, f.BatchPacked)}
    done: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, f.BatchAcknowledged):
            done[event.batch] = batches[event.batch]
        elif isinstance(event, f.BatchReturned):
            done.pop(event.batch, None)
    acknowledged = [group for groups in done.values() for group in groups]
    reasons: Counter[str] = Counter()
    for event in events:
        if isinstance(event, f.GroupDiscarded):
            reasons[event.reason] += sizes[event.group]
    return {
        "submitted": sum(sizes.values()),
        "acknowledged": sum(sizes[group] for group in acknowledged),
        "discarded": dict(reasons),
        "twice": [group for group, times in Counter(acknowledged).items() if times > 1],
    }


def in_unix_seconds(history: list[HistoryEntry]) -> Iterator[tuple[HistoryEntry, float]]:
    """Each entry with the Unix seconds of its ledger's zero; the ledger's clock stands while no manager runs."""
    zero = 0.0
    for entry in history:
        zero = entry.event.unix_s - entry.at if isinstance(entry.event, ManagerStarted) else zero
        yield entry, zero


def engine_times(history: list[HistoryEntry]) -> list[dict[str, Any]]:
    """What befell engines, in Unix seconds."""
    rows: list[dict[str, Any]] = []
    last_seen: dict[str, float] = {}
    for entry, zero in in_unix_seconds(history):
        event = entry.event
        if isinstance(event, f.EngineHeard | f.EngineGreeted):
            last_seen[event.engine] = event.at + zero
        if isinstance(event, f.EngineGreeted | f.EngineDraining | f.EngineGone):
            cause = getattr(event, "reason", getattr(event, "cause", ""))
            rows.append({"what": type(event).__name__, "engine": event.engine, "at": entry.at + zero, "cause": cause})
            rows[-1] |= {"heardAt": last_seen[event.engine]} if isinstance(event, f.EngineGone) else {}
    return rows


def move_times(history: list[HistoryEntry]) -> list[dict[str, Any]]:
    """Of each sample that moved: from which engine when, and when it was given to which other one."""
    engines: dict[str, str] = {}
    tokens: dict[str, int] = {}
    waiting: dict[str, dict[str, Any]] = {}
    moves = []
    for entry, zero in in_unix_seconds(history):
        event = entry.event
        if isinstance(event, AssignmentTokens):
            tokens[entry.sample] = sum(end - start for start, end, _ in event.pieces)
        elif isinstance(event, f.Moved):
            origin = {"from": engines[entry.sample], "at": entry.at + zero, "cause": event.cause}
            waiting[entry.sample] = origin | {"tokens": tokens.pop(entry.sample, 0)}
        elif isinstance(event, f.Assigned):
            engines[event.sample] = event.engine
            tokens.pop(event.sample, None)
            if event.sample in waiting:
                moves.append(waiting.pop(event.sample) | {"to": event.engine, "againAt": entry.at + zero})
    return moves


if __name__ == "__main__":
    main()
