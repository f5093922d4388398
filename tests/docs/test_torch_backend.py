"""`make install` asks for a torch without CUDA's libraries only where there is no GPU and PyTorch's index answers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CASES = [
    # a GPU's device, uv's exit status, the user's own choice, the option
    pytest.param(False, 0, None, "--torch-backend=cpu", id="no GPU"),
    pytest.param(True, 0, None, "", id="a GPU"),
    pytest.param(False, 2, None, "", id="no index"),
    pytest.param(False, 0, "cu130", "", id="the user's choice"),
]


@pytest.mark.parametrize(("gpu", "status", "chosen", "option"), CASES)
def test_the_option_fits_machine_and_network(
    tmp_path: Path, gpu: bool, status: int, chosen: str | None, option: str
) -> None:
    uv, device = tmp_path / "uv", tmp_path / "nvidiactl"
    uv.write_text(f'#!/bin/sh\necho "$UV_HTTP_RETRIES $@" >>{tmp_path}/asked\nexit {status}\n')
    uv.chmod(0o755)
    if gpu:
        device.touch()
    environment = {**os.environ, "NVIDIA_DEVICE": str(device), "UV_TORCH_BACKEND": chosen or ""}
    done = subprocess.run(
        [ROOT / "make/torch-backend", uv, "python3"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.strip() == option
    asked = (tmp_path / "asked").read_text().split() if (tmp_path / "asked").exists() else []
    assert bool(asked) is (not gpu and chosen is None)
    assert (status != 0) == ("cannot be reached" in done.stderr)
    if asked:
        assert {"0", "--dry-run", "--torch-backend=cpu"} <= set(asked)
