"""What this machine's `nvidia-smi` says, where a script stands in for it: no GPU is needed, and none was seen here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polyrl_cli.local import gpus
from polyrl_cli.local.gpus import gpus_here
from polyrl_cli.local.loaded import loaded_libraries

LISTS_TWO = """#!/bin/sh
case "$1" in
  -L) echo 'GPU 0: NVIDIA L4 (UUID: GPU-aaaa)'; echo 'GPU 1: NVIDIA L4 (UUID: GPU-bbbb)' ;;
  *) echo 'GPU-aaaa, 23034'; echo 'GPU-bbbb, 23034' ;;
esac
"""
ODD_BYTES = """#!/bin/sh
printf 'GPU 0: \\377 (UUID: GPU-aaaa)\\n'
"""
BROKEN = """#!/bin/sh
echo 'Failed to initialize NVML: Driver/library version mismatch'
exit 18
"""
HANGS = """#!/bin/sh
exec sleep 60
"""


@pytest.fixture(autouse=True)
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch these tests run with."""
    monkeypatch.setattr(gpus, "version", lambda _: "2.15.0")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def stand_in(path: Path, script: str) -> None:
    program = path / "nvidia-smi"
    program.write_text(script)
    program.chmod(0o755)


def test_it_is_asked_and_cuda_visible_devices_counts(path: Path) -> None:
    stand_in(path, LISTS_TWO)
    assert [(gpu.name, gpu.memory_bytes) for gpu in gpus_here({}).gpus] == [("0", 23034 << 20), ("1", 23034 << 20)]
    assert [gpu.name for gpu in gpus_here({"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}).gpus] == ["1"]


@pytest.mark.parametrize(
    ("script", "words"),
    [(BROKEN, "lists no GPUs: Failed to initialize NVML"), (HANGS, "did not answer within 0.5 s")],
    ids=["broken driver", "hangs"],
)
def test_one_that_fails_is_a_note(path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str) -> None:
    monkeypatch.setattr(gpus, "DEADLINE_S", 0.5)
    stand_in(path, script)
    here = gpus_here({})
    assert (here.gpus, words in here.note) == ((), True), here.note


def test_bytes_that_are_no_text_end_nothing(path: Path) -> None:
    stand_in(path, ODD_BYTES)
    assert [gpu.name for gpu in gpus_here({}).gpus] == ["0"]


@pytest.mark.parametrize(("driver", "note"), [(False, ""), (True, "no nvidia-smi on PATH")])
def test_without_it_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool, note: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "GPU_DEVICE", tmp_path if driver else tmp_path / "none")
    here = gpus_here({})
    assert here.gpus == ()
    assert note in here.note
    assert bool(note) is bool(here.note)


def test_hidden_gpus_are_not_even_asked_for(path: Path) -> None:
    stand_in(path, BROKEN)
    assert gpus_here({"CUDA_VISIBLE_DEVICES": ""}) == gpus.GpusHere()


def test_a_torch_without_cuda_uses_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(path, LISTS_TWO)
    monkeypatch.setattr(gpus, "version", lambda _: "2.15.0+cpu")
    here = gpus_here({})
    assert here.gpus == ()
    assert "2.15.0+cpu is built without CUDA" in here.note


@pytest.mark.parametrize("driver", ["/dev/nvidiactl", "/dev/kfd", "/dev/dxg"], ids=["nvidia", "amd", "under windows"])
def test_nothing_is_forked_beside_a_gpu(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == driver)
    with loaded_libraries() as forks:
        assert forks is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with loaded_libraries() as forks:
        assert forks is not None
