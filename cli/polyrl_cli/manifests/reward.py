"""`polyrl reward`: what the user's function says of a row, before any run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from polyrl.errors import InvalidManifest, UserError
from polyrl.wire.checks import RESPONSE_FLAG, RewardTried
from polyrl_cli.manifests.checks import reward_on_row, unset_variables
from polyrl_cli.manifests.load import check_files, load_manifest, read_manifest
from polyrl_trainer.sample_log.texts import MAX_NAME_CHARS, readable

MAX_TEXT_CHARS: Final = 8000
"""Characters shown of a prompt, a response, an error: as in samples.jsonl."""
MOST_METRICS: Final = 50
NOT_PLAYED: Final = "note: the environment is not played: the response counts as all turns of the conversation together"


def reward_lines(file: Path, sets: Sequence[str], row: int, response: str | None) -> tuple[list[str], bool]:
    """What to print, and whether there is a reward. Raises UserError for what keeps the function from being called."""
    job = load_manifest(file, sets)
    if job.spec.recipe.reward is None:
        raise UserError(f"{file}: has no spec.recipe.reward, so there is nothing to try")
    check_files(job, file, sets)
    checked = reward_on_row(job, file.parent, row, response)
    for fault in checked.faults:
        if fault.field == RESPONSE_FLAG:
            raise UserError(f"--response: {fault.sentence}")
    faults = [*unset_variables(job), *checked.faults]
    if faults:
        raise InvalidManifest(read_manifest(file, sets).describe(faults))
    if checked.tried is None:
        raise UserError(*checked.unmade or [f"{file}: there is no row {row} in the first file of prompts"])
    note = [] if job.spec.recipe.environment is None else [NOT_PLAYED]
    return [*_lines(checked.tried), *note, *_printed(checked.printed)], not checked.tried.refusal


def _lines(tried: RewardTried) -> Iterator[str]:
    yield f"row       {tried.place}"
    yield f"prompt    {readable(tried.prompt, MAX_TEXT_CHARS)!r}"
    yield f"response  {readable(tried.response, MAX_TEXT_CHARS)!r}"
    if tried.refusal:
        yield f"no reward: {readable(tried.refusal, MAX_TEXT_CHARS)}"
    else:
        yield f"reward    {tried.reward:g}"
        shown = sorted(tried.metrics.items())[:MOST_METRICS]
        yield from (f"metric    {readable(name, MAX_NAME_CHARS)} {value:g}" for name, value in shown)
        if len(tried.metrics) > len(shown):
            yield f"          {len(tried.metrics) - len(shown):,} metrics more"
    yield f"took      {tried.seconds:.3f} s"


def _printed(text: str) -> Iterator[str]:
    if text.strip():
        yield "printed:"
        yield from (f"  {line}" for line in text.rstrip().splitlines())
