"""`polyrl explain RUN SAMPLE`: one sample's whole life, line by line, from the journal of a live or finished run.

What it was asked and what it wrote come first, where samples.jsonl has kept them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from polyrl.errors import UserError
from polyrl.history.foreign_text import printable
from polyrl.ledger import events as f
from polyrl.ledger.audit.history import (
    AssignmentTokens,
    HistoryEntry,
    HistoryEvent,
    Piece,
    batch_subject,
    engine_subject,
)
from polyrl.ledger.journal import Replayed
from polyrl.sample import ENVIRONMENT_VERSION, DiscardReason, Group, Purpose, split_sample_id
from polyrl_cli.inspection.journal_reader import JournalReader, open_journal
from polyrl_cli.inspection.kept_samples import examples, read_samples
from polyrl_cli.local.run_folder import RunFolder, find_run

EXAMPLES: Final = 5
"""Samples named when the one asked for does not exist."""


def explain_lines(run: Path, sample: str) -> list[str]:
    """The life of `sample`. Raises UserError naming a few samples when there is no such one."""
    folder = find_run(run)
    try:
        number, index = split_sample_id(sample)
    except ValueError:
        raise UserError(f"{sample!r} is not the name of a sample; {_examples(folder)}") from None
    # A resumed run has a journal per epoch; where two know the name, the newer one's is meant.
    for path in (folder.journal, *reversed(folder.older_journals())):
        with open_journal(path) as journal:
            known = _entries_of(journal, sample, number, index)
            if known is not None:
                first, *life = _life_lines(journal, sample, *known)
                return [first, *_text_lines(folder, sample), *life]
    raise UserError(f"this run has no sample {sample}; {_examples(folder)}")


def _life_lines(journal: JournalReader, sample: str, submitted_at: float, entries: Iterable[HistoryEntry]) -> list[str]:
    when = journal.moment_text(submitted_at)
    lines, life = [f"sample {sample}, submitted {when}"], _Life(sample)
    for entry in entries:
        lines += [f"{entry.at - submitted_at:+10.3f} s  {text}" for text in life.lines(entry)]
    now = _now_line(journal.replay(), sample)
    return lines if now is None else [*lines, f"{'now':>12}  {now}"]


def _entries_of(
    journal: JournalReader, sample: str, number: int, index: int
) -> tuple[float, list[HistoryEntry]] | None:
    """When it was submitted, and all that concerns it, its group, batches and engines; None when it is not known."""
    group = journal.history_of(str(number))
    submitted = group[0].event if group else None
    if not isinstance(submitted, f.GroupSubmitted) or not 0 <= index < submitted.group.n:
        return None
    batches = [batch_subject(entry.event.batch) for entry in group if isinstance(entry.event, f.BatchPacked)]
    own = [entry.event for entry in journal.history_of(sample)]
    engines = {engine_subject(event.engine) for event in own if isinstance(event, f.Assigned)}
    return group[0].at, journal.history_of(sample, str(number), *batches, *engines)


def _text_lines(folder: RunFolder, sample: str) -> list[str]:
    rows = read_samples(folder)
    row = next((row for row in reversed(rows) if row.sample == sample), None)
    if row is None:
        return ["its text was not kept: samples.jsonl has a few of each step (recipe.logging.samples)"] if rows else []
    return [
        f"{name}:\n{textwrap.indent(printable(text, lines=True) or '(empty)', '    ')}"
        for name, text in (("prompt", row.prompt), ("response", row.response))
    ]


def _examples(folder: RunFolder) -> str:
    names = examples(read_samples(folder), EXAMPLES) if folder.samples.is_file() else []
    with open_journal(folder.journal) as journal:
        names = list(dict.fromkeys([*names, *journal.some_samples(EXAMPLES)]))[:EXAMPLES]
    return f"samples of this run are {', '.join(names)}" if names else "this run has no sample yet"


class _Life:
    """One sample's way through the entries that concern it and its engines."""

    def __init__(self, sample: str) -> None:
        self._sample = sample
        self._engine = ""
        """Where it runs; empty while it does not."""
        self._pieces: list[Piece] = []
        """What its running assignment has brought; known once that ends."""
        self._versions: dict[str, int] = {}
        self._learned = True
        """False when its group is an evaluation's."""
        self._step = -1

    def lines(self, entry: HistoryEntry) -> list[str]:
        """What an entry means for the sample; mostly one line."""
        event = entry.event
        match event:
            case f.EngineGreeted() | f.EngineServing():
                self._versions[event.engine] = event.version
            case AssignmentTokens():
                self._pieces = event.pieces
            case f.GroupSubmitted():
                self._learned, self._step = event.group.purpose is Purpose.TRAIN, event.group.step
                return [_submitted(event.group, entry.tokens)]
            case f.Assigned() | f.Reclaimed():
                return [self._began(event)]
            case f.Moved():
                return [f"leaves {self._engine} unfinished ({event.cause}) with {self._brought()}; waits again"]
            case f.TurnEnded() if not self._engine:
                return [f"its turn was over already: {event.finish}"]
            case f.TurnEnded():
                return [f"turn ends on {self._engine} ({event.finish}) with {self._brought()}"]
            case f.TurnExtended():
                return [f"an environment wrote {entry.tokens} tokens; waits for the next turn"]
            case f.SampleScored():
                return [_scored(event)]
            case f.GroupDiscarded():
                stopped = [f"stopped on {self._engine} with {self._brought()}"] if self._engine else []
                return [*stopped, _discarded(event, self._sample)]
            case _:
                return _of_others(event, self._learned, self._step)
        return []

    def _began(self, event: f.Assigned | f.Reclaimed) -> str:
        self._engine, self._pieces = event.engine, []
        if isinstance(event, f.Reclaimed):
            return f"goes on at {event.length} on {event.engine}, which is back (assignment {event.assignment})"
        version = self._versions.get(event.engine, ENVIRONMENT_VERSION)
        return f"assigned to {event.engine}, which serves version {version} (assignment {event.assignment})"

    def _brought(self) -> str:
        """The tokens of the assignment that ends; none runs after it."""
        pieces, self._pieces, self._engine = self._pieces, [], ""
        if not pieces:
            return "no new token"
        parts = [f"{end - start} tokens of version {version} ({start}..{end - 1})" for start, end, version in pieces]
        return ", ".join(parts)


def _of_others(event: HistoryEvent, learned: bool, step: int) -> list[str]:
    """What the event says of the sample's group, its batch and its engines."""
    match event:
        case f.EngineDeparted() if event.step == step:
            return [_departed(event)]
        case f.GroupCompleted():
            return [f"all samples of group {event.group} are scored"]
        case f.BatchPacked():
            return [f"packed into batch {event.batch}"]
        case f.BatchReturned():
            return [f"the trainer that had batch {event.batch} is gone, or did not take it; offered again"]
        case f.BatchReleased():
            why = "for want of room" if event.early else "a checkpoint contains it"
            return [f"batch {event.batch} is kept no longer: {why}"]
        case f.BatchAcknowledged():
            return [f"{'trained' if learned else 'measured'}: batch {event.batch} is acknowledged"]
    return []


def _submitted(group: Group, prompt_tokens: int) -> str:
    versions = f"version {group.min_version}"
    if group.max_version != group.min_version:
        versions = f"a version from {group.min_version} to {group.max_version}"
    prompt = f"prompt of {prompt_tokens} tokens, at most {group.sampling.max_new_tokens} to generate by {versions}"
    return f"submitted for step {group.step} ({group.purpose}) in group {group.id} of {group.n}: {prompt}"


def _scored(event: f.SampleScored) -> str:
    metrics = ", ".join(f"{name} {value:g}" for name, value in event.metrics.items())
    return f"scored: reward {event.reward:g}{f' ({metrics})' if metrics else ''}"


def _discarded(event: f.GroupDiscarded, sample: str) -> str:
    if event.culprit and event.culprit != sample:
        because = f"because sample {event.culprit} was ({event.reason}: {event.detail})"
        return f"discarded: {DiscardReason.GROUP_INCOMPLETE}, {because}"
    return f"discarded: {event.reason}{f' ({event.detail})' if event.detail else ''}"


def _departed(event: f.EngineDeparted) -> str:
    pause = f"; it pauses for {event.until - event.at:.0f} s" if event.until > event.at else ""
    return f"{event.engine}'s tokens in step {event.step} are not the policy's: {event.text}{pause}"


def _now_line(replayed: Replayed | None, sample: str) -> str | None:
    """Where a live sample is; None when it has ended."""
    live = None if replayed is None else replayed.state.samples.get(sample)
    if replayed is None or live is None:
        return None
    since = f"for {replayed.at - live.since:.1f} s as of the journal's last event"
    if live.assignment:
        engine = replayed.state.assignments[live.assignment].engine
        return f"runs on {engine} {since}; {live.length} tokens so far, {live.generated} of them generated"
    return f"{live.phase} {since}; {live.length} tokens"
