"""The files of a learner's checkpoint: safetensors and JSON, no pickle, each with a checksum.

config.json, generation_config.json, model.safetensors   a Hugging Face folder; weights in float32, those that adapters
                                                         leave alone as they are held
value_head.safetensors                                   of a policy that is its own critic
adapter/...                                              adapters as peft reads them; then a resume needs no more
optimizer.safetensors                                    `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`; in 8 bits
                                                         `exp_avg_scale/NAME` and `exp_avg_sq_scale/NAME` too
rng.safetensors                                          generator states, one per device type
training_state.json                                      step and checksums; written last
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from polyrl.errors import UNDECODABLE, InvalidData
from polyrl.manifest.parts.optimizer import OptimizerName
from polyrl_trainer.checkpoints import checksum, disk_refusal, sync, writing

FORMAT_VERSION = 1
STATE_FILE = "training_state.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng.safetensors"
VALUE_HEAD_FILE = "value_head.safetensors"

SAFETENSORS_METADATA = {"format": "pt"}
"""transformers refuses weight files that do not say this."""
SCALES = "exp_avg_scale/"
"""Begins names of what only moments in 8 bits have."""
OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""In what safetensors says of a file that it could not write."""


class TrainingState(msgspec.Struct, frozen=True):
    """What `training_state.json` holds."""

    format_version: int
    step: int
    """Optimizer steps taken; the schedule is a function of it."""
    checksums: dict[str, str]
    """xxh3-128 in hex, by file name, of every other file."""
    base: str = ""
    """Checksum of the weights below adapters, see `lora.base_checksum`; empty without adapters."""


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    files: Mapping[str, bytes],
    *,
    fsync: bool,
    base: str = "",
) -> None:
    """Writes `tensors` (by file name, then tensor name) and `files` into an existing empty folder, the state last.

    Raises DiskRefused.
    """
    for name in (*tensors, *files):
        with writing(folder / name):
            (folder / name).parent.mkdir(exist_ok=True)
    for name, by_name in tensors.items():
        write_tensors(folder / name, by_name)
    seal(folder, step, list(tensors), files, fsync=fsync, base=base)


def write_tensors(path: Path, by_name: Mapping[str, torch.Tensor]) -> None:
    """Raises DiskRefused; safetensors has an error of its own for it."""
    contents = {key: tensor.detach().contiguous() for key, tensor in by_name.items()}
    try:
        with writing(path):
            save_file(contents, path, metadata=SAFETENSORS_METADATA)
    except SafetensorError as error:
        number = OS_ERROR.search(str(error))
        raise disk_refusal(path, number and int(number[1]), str(error)) from error


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes; of one that is sharded, those of all ranks."""
    return sum(one.numel() * one.element_size() for one in tensors)


def require_empty(folder: Path) -> None:
    """Raises FileExistsError."""
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")


def seal(
    folder: Path, step: int, written: Sequence[str], files: Mapping[str, bytes], *, fsync: bool, base: str = ""
) -> None:
    """Writes `files` beside what is `written` already, then the state, which tells what all of them must be."""
    for name, content in files.items():
        _write(folder / name, content)
    checksums = {name: checksum(folder / name) for name in [*written, *files]}
    state = TrainingState(FORMAT_VERSION, step, checksums=checksums, base=base)
    _write(folder / STATE_FILE, msgspec.json.format(msgspec.json.encode(state)))
    if fsync:
        for path in (*(folder / name for name in checksums), folder / STATE_FILE, folder):
            sync(path)


def _write(path: Path, content: bytes) -> None:
    with writing(path):
        path.write_bytes(content)


def read_state(folder: Path, *, check: bool = True) -> TrainingState:
    """Raises InvalidData naming the file that is missing, unreadable or, with `check`, changed since it was written."""
    path = folder / STATE_FILE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=TrainingState)
    except FileNotFoundError as error:
        raise InvalidData(f"{path}: missing, so this is no finished checkpoint") from error
    except UNDECODABLE as error:
        raise InvalidData(f"{path}: {error}") from error
    if state.format_version != FORMAT_VERSION:
        raise InvalidData(f"{path}: format version {state.format_version}, this release reads {FORMAT_VERSION}")
    for name, noted in state.checksums.items() if check else ():
        if not (folder / name).is_file():
            raise InvalidData(f"{folder / name}: missing from the checkpoint")
        if checksum(folder / name) != noted:
            raise InvalidData(f"{folder / name}: its checksum is not the one that was noted when it was written")
    return state


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of the generators that an own loss may draw from, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(path: Path, device: torch.device) -> None:
    """Sets generators as they were written; a GPU's is left as it is where none was written. Raises InvalidData."""
    found = read_tensors(path, None)
    here = {kind: state for kind, state in generator_states(device).items() if kind == "cpu" or kind in found}
    check_tensors(path, {kind: state for kind, state in found.items() if kind in here}, here)
    torch.set_rng_state(found["cpu"])
    if "cuda" in here:
        torch.cuda.set_rng_state(found["cuda"], device)


def other_base(folder: Path) -> str:
    """Says that a checkpoint's base is not this run's."""
    return (
        f"{folder}: was not trained on the weights that this run's adapters stand on; recipe.model, its dtype among it,"
        " has to be what the run began with"
    )


def read_tensors(path: Path, expected: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU; names, shapes and dtypes must be those of `expected`, if given.

    Raises InvalidData naming the file and the first tensor that does not fit.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidData(f"{path}: cannot be read: {error}") from error
    if expected is not None:
        check_tensors(path, tensors, expected)
    return tensors


def check_tensors(path: Path, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raises InvalidData unless both hold the same names, shapes and dtypes."""
    check_names(path, found.keys(), expected.keys())
    for name, tensor in expected.items():
        if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            raise InvalidData(f"{path}: {name} is {_kind(found[name])}, this run needs {_kind(tensor)}")


def check_names(path: Path, found: Set[str], expected: Set[str]) -> None:
    """Raises InvalidData unless both are the same."""
    if odd := sorted(found ^ expected):
        whose = "has" if odd[0] in found else "lacks"
        other = ""
        if odd[0].startswith(SCALES):
            names = (OptimizerName.ADAMW_8BIT, OptimizerName.ADAMW)
            saved, here = names if odd[0] in found else reversed(names)
            other = f"; it was saved with optimizer.name {saved.value}, and this run has {here.value}"
        raise InvalidData(f"{path}: does not fit this model and optimizer, it {whose} {odd[0]}{other}")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
