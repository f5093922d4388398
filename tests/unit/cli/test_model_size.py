"""What is read of a model's folder where there is no model, or none that a reader survives."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrl.manifest.recipe import ModelSpec
from polyrl_cli.manifests.model_size import config_fields


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
