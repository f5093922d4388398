"""A finished run as its manager's journal has it: what became of each sample, and what each kill did, to the token.

The journal says when each token was accepted, of which assignment, and when and why an assignment was moved: the times
are the manager's own.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from polyrl.ledger import journal as form
from polyrl.ledger.audit.history import RUN, ManagerStarted
from polyrl.ledger.events import (
    Assigned,
    BatchAcknowledged,
    BatchPacked,
    Event,
    GroupDiscarded,
    GroupSubmitted,
    Moved,
    TokensTaken,
    TurnEnded,
)
from polyrl.ledger.journal import decode_events
from polyrl.sample import sample_id
from polyrl.wire import row_columns
from polyrl_cli.inspection.journal_reader import open_journal


@dataclass(frozen=True)
class Kill:
    """One SIGKILL."""

    victim: str
    wall: float
    """Unix seconds."""


@dataclass(frozen=True)
class Aftermath:
    """What one kill did to the samples that its victim ran; seconds since the kill."""

    detected: list[float]
    """Per sample: taken from the victim."""
    flowing: list[float]
    """Per sample: its next token accepted, from another engine."""


class Journal:
    """A finished run's journal. Raises ValueError when a snapshot has replaced the events: take fewer kills."""

    def __init__(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as db:
            (snapshot, *_) = db.execute(form.SELECT_SNAPSHOT).fetchone()
            rows = db.execute(form.SELECT_EVENTS).fetchall()
        if snapshot:
            raise ValueError(f"{path}: events up to {snapshot} are gone")
        with open_journal(path) as journal:
            first = journal.history_of(RUN)[0]
        assert isinstance(first.event, ManagerStarted), "a journal opens with the beginning of its run"
        self.config = first.event.config
        self._ahead = first.event.unix_s - first.at
        self._samples: dict[int, str] = {}
        self._engines: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._batches: dict[int, list[int]] = {}
        self.ends: list[tuple[str, str]] = []
        """(sample, `acknowledged` or `discarded`)"""
        self.moved: dict[int, Moved] = {}
        self.tokens: dict[str, list[tuple[float, int]]] = {}
        """Per sample: when tokens were accepted, and of which assignment."""
        self.seen: dict[str, list[float]] = {}
        """Per sample: when it was first placed, got tokens, ended its turn."""
        self.taken: list[TokensTaken] = []
        self.accepted: Counter[str] = Counter()
        """Tokens per engine."""
        for _, _, body, _ in rows:
            for event in decode_events(body):
                self._read(event)

    def clock(self, wall: float) -> float:
        """The manager's clock at a Unix time."""
        return wall - self._ahead

    def aftermath(self, kill: Kill) -> Aftermath:
        """Of the samples that were moved from the victim; those whose last tokens were on their way needed no move."""
        at = self.clock(kill.wall)
        lost = [n for n, moved in self.moved.items() if self._engines[n] == kill.victim and moved.at >= at]
        flowing = (self._next_token(number) for number in lost)
        return Aftermath([self.moved[n].at - at for n in lost], [when - at for when in flowing if when is not None])

    def longest_silences(self) -> Iterable[float]:
        """Per sample: its longest time between two accepted tokens, from its first placement to the end of its turn."""
        return (max(later - earlier for earlier, later in pairwise(times)) for times in self.seen.values())

    def _next_token(self, number: int) -> float | None:
        """When the sample of an assignment that was moved got its first token by a later one."""
        tokens = self.tokens.get(self._samples[number], [])
        return next((at for at, later in tokens if later > number), None)

    def _read(self, event: Event) -> None:
        match event:
            case GroupSubmitted():
                self._sizes[event.group.id] = event.group.n
            case Assigned():
                self._samples[event.assignment], self._engines[event.assignment] = event.sample, event.engine
                self.seen.setdefault(event.sample, [event.at])
            case Moved():
                self.moved[event.assignment] = event
            case TurnEnded():
                self.seen[event.sample].append(event.at)
            case TokensTaken():
                self._read_tokens(event)
            case BatchPacked():
                self._batches[event.batch] = event.groups
            case BatchAcknowledged():
                self.ends += [
                    (name, "acknowledged") for group in self._batches[event.batch] for name in self._members(group)
                ]
            case GroupDiscarded():
                self.ends += [(name, "discarded") for name in self._members(event.group)]

    def _members(self, group: int) -> list[str]:
        return [sample_id(group, index) for index in range(self._sizes[group])]

    def _read_tokens(self, event: TokensTaken) -> None:
        self.taken.append(event)
        self.accepted[event.engine] += len(event.ids) // 4
        numbers, _, counts, _ = row_columns(event.rows)
        for number, count in zip(numbers, counts, strict=True):
            if count:
                name = self._samples[number]
                self.tokens.setdefault(name, []).append((event.at, number))
                self.seen[name].append(event.at)
