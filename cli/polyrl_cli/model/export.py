"""`polyrl export RUN DIR`: a checkpoint's model as a folder of its own, without what only the learner needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from polyrl.errors import UNDECODABLE, UserError
from polyrl.history.model_card import CARD, ORIGIN, ModelOrigin, model_card
from polyrl_cli.local.run_folder import VALUE_BYTES, find_run
from polyrl_cli.model.sealed import MODEL, SEAL, copy_sealed, find_checkpoint, new_folder, read_seal, require_room


class _Results(msgspec.Struct, frozen=True):
    """What a card takes from trainer-result.json."""

    evaluations: dict[str, dict[str, float]] = {}
    steps: dict[str, int] = {}
    """Whole ones by stage, the last stage last."""


def export_lines(run: Path, target: Path, step: int | None) -> list[str]:
    """Copies the model of the newest checkpoint, or of `step`, and says what was copied. Raises UserError."""
    folder = find_run(run)
    checkpoint = find_checkpoint(folder.checkpoints, step)
    files = read_seal((checkpoint / SEAL).read_bytes(), str(checkpoint / SEAL)).of_model()
    sizes = [sealed.size for sealed in files.values()]
    with new_folder(target) as unfinished:
        require_room(sizes, shutil.disk_usage(unfinished).free)
        for name, sealed in files.items():
            copy_sealed(checkpoint / MODEL / name, unfinished / name, sealed)
        complete_card(unfinished, folder.trainer_result)
    return [f"{target}: the model of {checkpoint.name}, {len(files)} files, {sum(sizes):,} bytes"]


def complete_card(model: Path, trainer_result: Path) -> None:
    """Writes the origin and the card anew with the results of the run, if it has ended with these weights: the last
    evaluation comes after the last checkpoint. A model from before there were cards is left alone."""
    file = model / ORIGIN
    if not (file.is_file() and trainer_result.is_file()):
        return
    try:
        results = msgspec.json.decode(_value_in(trainer_result), type=_Results)
    except UNDECODABLE as error:
        raise UserError(f"{trainer_result}: not written by PolyRL: {error}") from error
    origin = read_origin(file)
    if origin.groups or [*results.steps.items()][-1:] != [(origin.stage, origin.step)]:
        return
    origin = msgspec.structs.replace(origin, evaluations={**origin.evaluations, **results.evaluations})
    file.write_bytes(msgspec.json.format(msgspec.json.encode(origin)) + b"\n")
    (model / CARD).write_text(model_card(origin), encoding="utf-8")


def read_origin(file: Path) -> ModelOrigin:
    """`polyrl.json`. Raises UserError when it cannot be read."""
    try:
        return msgspec.json.decode(_value_in(file), type=ModelOrigin)
    except (OSError, *UNDECODABLE) as error:
        raise UserError(f"{file}: does not say where a model comes from: {error}") from error


def _value_in(file: Path) -> bytes:
    size = file.stat().st_size
    if size > VALUE_BYTES:
        raise UserError(f"{file}: has {size:,} bytes; at most {VALUE_BYTES:,} are read")
    return file.read_bytes()
