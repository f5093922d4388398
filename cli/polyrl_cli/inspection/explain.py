"""`polyrl explain RUN SAMPLE`: one sample's whole life, line by line, from the journal of a live or finished run.

Refuses to hold: reading (see `journal_reader`), a screen (the lines are plain text). Read next: `journal_reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from polyrl.errors import UserError
from polyrl.ledger.audit import records as r
from polyrl.ledger.journal.file_format import Replayed
from polyrl.sample import DiscardReason
from polyrl_cli.inspection.journal_reader import JournalReader, open_journal
from polyrl_cli.local.run_folder import find_run

EXAMPLES: Final = 5
"""Samples named when the one asked for does not exist."""


def explain_lines(run: Path, sample: str) -> list[str]:
    """The life of `sample`. Raises UserError naming a few samples when there is no such one."""
    with open_journal(find_run(run).journal) as journal:
        life = _life_of(journal, sample)
        origin = life[0]
        offset = journal.wall_offset()
        lines = [_head(sample, origin, offset)]
        lines += [f"{record.at - origin.at:+10.3f} s  {text}" for record in life for text in _tell(record, sample)]
        now = _now_line(journal.replay(), sample)
        return lines if now is None else [*lines, f"{'now':>12}  {now}"]


def _life_of(journal: JournalReader, sample: str) -> list[r.AnyRecord]:
    try:
        own, group = r.abouts_of(sample)
    except ValueError:
        raise UserError(f"{sample!r} is not the name of a sample; {_examples(journal)}") from None
    of_group = journal.records_about(group)
    index = int(sample.partition(".")[2])
    if not of_group or not isinstance(of_group[0], r.Submitted) or not 0 <= index < of_group[0].n:
        raise UserError(f"this run has no sample {sample}; {_examples(journal)}")
    batches = [r.about_batch(record.batch) for record in of_group if isinstance(record, r.Packed)]
    return journal.records_about(own, group, *batches)


def _examples(journal: JournalReader) -> str:
    names = journal.some_samples(EXAMPLES)
    return f"samples of this run are {', '.join(names)}" if names else "this run has no sample yet"


def _head(sample: str, origin: r.AnyRecord, offset: float) -> str:
    when = datetime.fromtimestamp(offset + origin.at, UTC)
    return f"sample {sample}, submitted {when:%Y-%m-%d %H:%M:%S} UTC"


def _tell(record: r.AnyRecord, sample: str) -> Iterator[str]:
    teller = _TELLERS.get(type(record))
    if teller is not None:
        yield teller(record, sample)


def _submitted(record: r.Submitted, _: str) -> str:
    versions = f"version {record.min_version}"
    if record.max_version != record.min_version:
        versions = f"a version from {record.min_version} to {record.max_version}"
    prompt = f"prompt of {record.prompt_tokens} tokens, at most {record.max_new_tokens} to generate by {versions}"
    return f"submitted for step {record.step} ({record.purpose}) in group {record.group} of {record.n}: {prompt}"


def _assigned(record: r.Assigned, _: str) -> str:
    return f"assigned to {record.engine}, which serves version {record.version} (assignment {record.assignment})"


def _moved(record: r.Moved, _: str) -> str:
    return f"leaves {record.engine} unfinished ({record.cause}) with {_pieces(record.pieces)}; waits again"


def _turn_ended(record: r.TurnEnded, _: str) -> str:
    if not record.assignment:
        return f"its turn was over already: {record.finish}"
    return f"turn ends on {record.engine} ({record.finish}) with {_pieces(record.pieces)}"


def _pieces(pieces: list[r.Piece]) -> str:
    if not pieces:
        return "no new token"
    parts = [f"{end - start} tokens of version {version} ({start}..{end - 1})" for start, end, version in pieces]
    return ", ".join(parts)


def _scored(record: r.Scored, _: str) -> str:
    metrics = ", ".join(f"{name} {value:g}" for name, value in record.metrics.items())
    return f"scored: reward {record.reward:g}{f' ({metrics})' if metrics else ''}"


def _discarded(record: r.Discarded, sample: str) -> str:
    reason = record.reason
    if record.culprit and record.culprit != sample:
        reason = DiscardReason.GROUP_INCOMPLETE
        return f"discarded: {reason}, because sample {record.culprit} was ({record.reason}: {record.detail})"
    return f"discarded: {reason}{f' ({record.detail})' if record.detail else ''}"


_TELLERS: Final[dict[type, Callable[[Any, str], str]]] = {
    r.Submitted: _submitted,
    r.Assigned: _assigned,
    r.Moved: _moved,
    r.Cut: lambda record, _: f"stopped on {record.engine} with {_pieces(record.pieces)}",
    r.TurnEnded: _turn_ended,
    r.Extended: lambda record, _: f"an environment wrote {record.tokens} tokens; waits for the next turn",
    r.Scored: _scored,
    r.Completed: lambda record, _: f"all samples of group {record.group} are scored",
    r.Packed: lambda record, _: f"packed into batch {record.batch}",
    r.Unpacked: lambda record, _: f"its trainer ended before batch {record.batch} was acknowledged; offered again",
    r.Acknowledged: lambda record, _: f"trained: batch {record.batch} is acknowledged",
    r.Discarded: _discarded,
}


def _now_line(replayed: Replayed | None, sample: str) -> str | None:
    """Where a live sample is; None when it has ended."""
    live = None if replayed is None else replayed.state.samples.get(sample)
    if replayed is None or live is None:
        return None
    since = f"for {replayed.at - live.since:.1f} s as of the journal's last fact"
    if live.assignment:
        engine = replayed.state.assignments[live.assignment].engine
        return f"runs on {engine} {since}; {live.length} tokens so far, {live.generated} of them generated"
    return f"{live.phase} {since}; {live.length} tokens"
