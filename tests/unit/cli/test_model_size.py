"""What is read of a model's folder where there is no model, or none that a reader survives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polyrl.manifest.recipe import ModelSpec
from polyrl_cli.manifests.model_size import CONFIG_BYTES, config_fields


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"vocab_size": 3}', {"vocab_size": 3}),
        ("[1]", {}),
        ("", {}),
        ("\xff", {}),
        ("[" * 3000 + "]" * 3000, {}),
        (None, {}),
    ],
    ids=["a config", "a list", "nothing", "no JSON", "deeper than Python goes", "no file"],
)
def test_fields_of_a_config(tmp_path: Path, written: str | None, expected: dict[str, int]) -> None:
    (tmp_path / "model").mkdir()
    if written is not None:
        (tmp_path / "model" / "config.json").write_text(written, encoding="latin-1")
    assert config_fields(ModelSpec(path="model"), tmp_path) == expected


@pytest.mark.parametrize("odd", ["a pipe", "a device", "a long file"])
def test_a_config_that_is_no_file_of_a_few_bytes_is_not_read(tmp_path: Path, odd: str) -> None:
    """`polyrl plan` waited for the pipe, and filled the memory from the device."""
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    if odd == "a pipe":
        os.mkfifo(config)
    elif odd == "a device":
        config.symlink_to("/dev/zero")
    else:
        config.touch()
        os.truncate(config, CONFIG_BYTES + 1)
    assert config_fields(ModelSpec(path="model"), tmp_path) == {}
