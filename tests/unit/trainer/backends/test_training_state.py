"""A checkpoint of another format is refused by its number, never misread; generators go on on any kind of device."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from polyrl.errors import InvalidData
from polyrl_trainer.backends.training_state import (
    FORMAT_VERSION,
    STATE_FILE,
    generator_states,
    read_state,
    restore_generators,
    write_checkpoint,
    write_tensors,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 7, tensors={}, files={}, fsync=False)
    state = read_state(tmp_path)
    assert state.step == 7
    other = msgspec.structs.replace(state, format_version=FORMAT_VERSION + 1)
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(other))
    with pytest.raises(InvalidData, match=rf"format version {FORMAT_VERSION + 1}, this release reads {FORMAT_VERSION}"):
        read_state(tmp_path)


class PlayedGpu:
    """Of which torch has a generator's state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = {GPU: torch.arange(16, dtype=torch.uint8)}
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.states.__getitem__)
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: self.states.update({device: state}))


@pytest.mark.parametrize(("saved_on", "went_on"), [(CPU, CPU), (CPU, GPU), (GPU, CPU), (GPU, GPU)], ids=str)
def test_generators_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_on: torch.device, went_on: torch.device
) -> None:
    gpu = PlayedGpu(monkeypatch)
    torch.manual_seed(3)
    write_tensors(file := tmp_path / "rng.safetensors", generator_states(saved_on))
    wanted = torch.rand(3)
    gpu.states[GPU] = other = torch.full((16,), 9, dtype=torch.uint8)
    restore_generators(file, went_on)
    assert torch.equal(torch.rand(3), wanted)
    both = saved_on == went_on == GPU
    assert torch.equal(gpu.states[GPU], torch.arange(16, dtype=torch.uint8) if both else other)


@pytest.mark.parametrize(
    ("states", "fault"),
    [({"cuda": torch.zeros(16, dtype=torch.uint8)}, "lacks cpu"), ({"cpu": torch.zeros(4)}, r"cpu is float32\[4\]")],
    ids=["none of the CPU", "of another kind"],
)
def test_what_is_no_generators_state_is_refused(tmp_path: Path, states: dict[str, torch.Tensor], fault: str) -> None:
    write_tensors(file := tmp_path / "rng.safetensors", states)
    with pytest.raises(InvalidData, match=fault):
        restore_generators(file, CPU)
