"""`python -m polyrl_trainer.check`: one part of the check, reported to a file, line by line.

What user code prints goes where this process prints; so the report has a file of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import structlog
import typer

from polyrl import parent_death_signal
from polyrl.errors import InvalidData
from polyrl.manifest.job import JobSpec, read_job
from polyrl.wire.checks import CheckBegan, CheckEnded, CheckFault, CheckMessage, CheckPart, encode_check
from polyrl_trainer.check.code import REWARD, check_code, try_reward
from polyrl_trainer.check.model import check_model
from polyrl_trainer.check.rows import check_data


def main(
    job: Annotated[Path, typer.Option(help="The job, as JSON.")],
    manifest_dir: Annotated[Path, typer.Option(help="Folder that the manifest's relative paths start from.")],
    out: Annotated[Path, typer.Option(help="File of the report.")],
    part: Annotated[CheckPart, typer.Option(help="What to look at.")],
    row: Annotated[int, typer.Option(help="Row that the reward is tried on, from 1.")] = 1,
    response: Annotated[str | None, typer.Option(help="What the policy wrote; default: the row's answer.")] = None,
) -> None:
    """Report what is wrong with a job's rows, model or code."""
    parent_death_signal.hold()
    # What a run logs of a failure is in the report.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    spec = read_job(job).spec
    if part is CheckPart.DATA or (part is CheckPart.MODEL and spec.recipe.model.lora is None):
        # transformers then reads configs and tokenizers without loading tensors, in half the time. User code, which
        # may need them, runs in the other process.
        sys.modules["torch"] = None  # type: ignore[assignment]
    with out.open("wb", buffering=0) as report:
        for message in _messages(spec, manifest_dir, part, row, response):
            report.write(encode_check(message))
        report.write(encode_check(CheckEnded()))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that hang in user code, or that it started, must not keep the process.
    os._exit(0)


def _messages(
    spec: JobSpec, manifest_dir: Path, part: CheckPart, row: int, response: str | None
) -> Iterator[CheckMessage]:
    if part is CheckPart.DATA:
        yield from check_data(spec, manifest_dir)
    elif part is CheckPart.MODEL:
        yield from check_model(spec, manifest_dir)
    elif part is CheckPart.CODE:
        yield from _code_messages(spec, manifest_dir)
    else:
        yield CheckBegan(REWARD, f"calling the reward on row {row}")
        try:
            yield from _some(asyncio.run(try_reward(spec, manifest_dir, row, response)))
        except InvalidData as error:
            yield CheckFault(REWARD, str(error))


def _code_messages(spec: JobSpec, manifest_dir: Path) -> Iterator[CheckMessage]:
    broken = False
    for message in check_code(spec.recipe, manifest_dir):
        broken = broken or isinstance(message, CheckFault)
        yield message
    if not broken:
        yield CheckBegan(REWARD, "calling the reward on a row")
        with suppress(InvalidData):  # which the check of rows reports
            yield from _some(asyncio.run(try_reward(spec, manifest_dir)))


def _some(message: CheckMessage | None) -> Iterator[CheckMessage]:
    if message is not None:
        yield message


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)  # the last lines of what it prints are quoted to the user
    app.command()(main)
    app()
