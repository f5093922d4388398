"""`polyrl report RUN`: the page of a run's folder, one HTML file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from polyrl.errors import UserError
from polyrl.history.fleet import machines_by_pool, seconds_by_pool
from polyrl.history.foreign_text import printable
from polyrl.page.contents import RunRecord
from polyrl.page.page import render_page
from polyrl.status import SampleCounts, TokenCounts
from polyrl_cli.inspection.kept_samples import read_samples
from polyrl_cli.inspection.run_facts import LocalRunState, RunFacts, read_facts
from polyrl_cli.local.run_folder import RunFolder, find_run
from polyrl_cli.report.timeline import read_timeline

PROVENANCE: Final = {"seed": "seed", "epoch": "starts of this run"}
"""Names of summary.json, and the words for them."""

T = TypeVar("T")


def make_page_of_run(run: Path | None) -> tuple[Path, Callable[[], str]]:
    """The file that the page of `run` belongs in, and what makes the page as of now. Raises UserError when there is no
    such run."""
    folder = find_run(run)
    return folder.root / "report.html", lambda: render_page(record_of(folder, time.time()))


def write_page(file: Path, text: str) -> Path:
    """Writes the file and gives it back. Whoever reads it meanwhile sees the old page or the new one. Raises UserError
    when it cannot be written."""
    try:
        partial = file.with_name(f".{file.name}.partial")
        partial.unlink(missing_ok=True)
        with partial.open("x", encoding="utf-8") as page:  # never through a link that a received folder holds
            page.write(text)
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be written ({error.strerror})") from error
    return file


def record_of(folder: RunFolder, now: float) -> RunRecord:
    """What its files say, which may be of a live run, a dead one, or one that was fetched from a cluster and lacks
    some."""
    facts, events = read_facts(folder, now), read_timeline(folder.timeline)
    lives = facts.state is LocalRunState.RUNNING
    newest = max([event.time for event in events[-1:]] + [row.time for row in facts.rows[-1:]], default=now)
    end = facts.summary
    return RunRecord(
        job=facts.name,
        state=facts.state.value,
        why=str(end.get("cause") or end.get("why") or ""),
        job_settings=facts.settings,
        settings=yaml.safe_dump(facts.settings, sort_keys=False, allow_unicode=True, width=100),
        rows=facts.rows,
        events=events,
        samples=read_samples(folder),
        seconds=facts.seconds,
        held=seconds_by_pool(events, now if lives else newest),
        machines=machines_by_pool(events) if lives else {},
        counts=_of_summary(end, "samples", SampleCounts),
        tokens=_of_summary(end, "tokens", TokenCounts),
        step_time_ratio=_of_summary(end, "stepTimeRatio", float),
        provenance=_provenance(facts),
    )


def _of_summary(end: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """None where a summary has none, or none that can be read."""
    try:
        return msgspec.convert(end[name], kind)
    except (KeyError, msgspec.ValidationError, UnicodeError):  # half of a surrogate pair, which JSON may name
        return None


def _provenance(facts: RunFacts) -> dict[str, str]:
    known = {words: printable(str(facts.summary[key])) for key, words in PROVENANCE.items() if key in facts.summary}
    return {"folder": facts.root.name} | known
