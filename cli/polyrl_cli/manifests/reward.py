"""`polyrl reward`: what the user's function says of a row, before any run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from polyrl.errors import InvalidManifest, UserError
from polyrl.wire.checks import RewardTried
from polyrl_cli.manifests.checks import reward_on_row, unset_variables
from polyrl_cli.manifests.load import check_files, load_manifest, read_manifest


def reward_lines(file: Path, sets: Sequence[str], row: int, response: str | None) -> tuple[list[str], bool]:
    """What to print, and whether there is a reward. Raises UserError for what keeps the function from being called."""
    job = load_manifest(file, sets)
    if job.spec.recipe.reward is None:
        raise UserError(f"{file}: has no spec.recipe.reward, so there is nothing to try")
    check_files(job, file, sets)
    checked = reward_on_row(job, file.parent, row, response)
    faults = [*unset_variables(job), *checked.faults]
    if faults:
        raise InvalidManifest(read_manifest(file, sets).describe(faults))
    if checked.tried is None:
        raise UserError(*checked.notes or [f"{file}: there is no row {row} in the first file of prompts"])
    return [*_lines(checked.tried), *_printed(checked.printed)], not checked.tried.refusal


def _lines(tried: RewardTried) -> Iterator[str]:
    yield f"row       {tried.place}"
    yield f"prompt    {tried.prompt!r}"
    yield f"response  {tried.response!r}"
    if tried.refusal:
        yield f"no reward: {tried.refusal}"
    else:
        yield f"reward    {tried.reward:g}"
        yield from (f"metric    {name} {value:g}" for name, value in sorted(tried.metrics.items()))
    yield f"took      {tried.seconds:.3f} s"


def _printed(text: str) -> Iterator[str]:
    if text.strip():
        yield "printed:"
        yield from (f"  {line}" for line in text.rstrip().splitlines())
