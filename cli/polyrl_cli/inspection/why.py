"""`polyrl why [RUN]`: who waits for whom, for what, since when and until when.

A live manager is asked over HTTP; when it does not answer, the journal shows how things stood at its last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from polyrl.control import Waits
from polyrl.errors import PolyRLError
from polyrl.history.fleet import OVER, RUN, FleetEvent
from polyrl.ledger.status import waits_of
from polyrl_cli.inspection.journal_reader import JournalReader, open_journal
from polyrl_cli.inspection.run_facts import is_locked
from polyrl_cli.local.run_folder import RunFolder, find_run
from polyrl_cli.report.timeline import read_timeline

WAITS_ANSWER_S: Final = 3.0
"""What a manager gets to answer: the longest that one may hear nothing of a healthy agent either."""


def why_lines(run: Path | None) -> list[str]:
    """The waits of a run, the longest first, under a line that says how they are known."""
    folder = find_run(run)
    waits, silence = asyncio.run(_ask(folder))
    standing = _indented(standing_conditions(read_timeline(folder.timeline)))
    if waits is not None:
        return [f"{folder.root}: the manager says", *(_indented(waits.waits) or ["  nobody waits"]), *standing]
    with open_journal(folder.journal) as journal:
        return [*_as_of_journal(folder, journal, silence), *standing]


def standing_conditions(events: Sequence[FleetEvent]) -> tuple[str, ...]:
    """What the runner noted of the whole fleet, and not that it is over; a new start ends all."""
    standing = dict[str, None]()
    for event in events:
        if event.kind == RUN:
            standing.clear()
        elif event.kind == "condition" and not event.worker:
            standing[event.text] = None
        elif event.kind == OVER:
            standing.pop(event.text, None)
    return tuple(f"the runner says: {text}" for text in standing)


async def _ask(folder: RunFolder) -> tuple[Waits | None, str]:
    """The manager's answer; or why there is none. Only a live run of this machine has one: a received folder names
    whatever address its sender liked."""
    if folder.summary.is_file() or not is_locked(folder):
        return None, "no runner is at work here"
    try:
        # A live run has what this needs installed beside it; a folder that was copied here may be read without.
        from polyrl_cli.local.manager import manager_of

        client = manager_of(folder)
        async with asyncio.timeout(WAITS_ANSWER_S), client:
            await client.find()
            waits = await client.waits()
    except ModuleNotFoundError as error:
        return None, f"asking it needs {error.name}: pip install 'polyrl[operator]'"
    except FileNotFoundError:
        return None, "it never announced where it listens"
    except TimeoutError:
        return None, f"no answer within {WAITS_ANSWER_S:g} s"
    except (OSError, ValueError, PolyRLError) as error:
        return None, str(error)
    return waits, "nobody listens there"


def _as_of_journal(folder: RunFolder, journal: JournalReader, silence: str) -> list[str]:
    replayed = journal.replay()
    if replayed is None:
        return [f"{folder.root}: the manager does not answer ({silence}), and its journal is empty"]
    when, state = journal.moment_text(replayed.at), replayed.state
    head = f"{folder.root}: the manager does not answer ({silence}); its journal, as of {when}, says"
    if state.finished:
        end = "well" if state.ok else "badly"
        return [head, f"  the run is over and ended {end}{f': {state.message}' if state.message else ''}; nobody waits"]
    return [
        head,
        *(_indented(tuple(wait.sentence(replayed.at) for wait in waits_of(state, replayed.at))) or ["  nobody waits"]),
    ]


def _indented(sentences: tuple[str, ...]) -> list[str]:
    return [f"  {sentence}" for sentence in sentences]
