"""A card gets what was measured of its own weights."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from polyrl.history.model_card import ORIGIN, ModelOrigin
from polyrl_cli.model.export import complete_card, read_origin


@pytest.mark.parametrize(("steps", "groups", "taken"), [(3, 0, True), (5, 0, False), (3, 4, False)])
def test_the_end_of_a_run_that_went_on_is_not_that_of_its_newest_checkpoint(
    tmp_path: Path, steps: int, groups: int, taken: bool
) -> None:
    """The result that lies there is of the run before until the run that goes on from it ends."""
    origin = ModelOrigin(
        job="j", base_model="m", stages=[], stage="rl", step=steps, groups=groups, seed=0, chat=False, max_new_tokens=9
    )
    (tmp_path / ORIGIN).write_bytes(msgspec.json.encode(origin))
    result = tmp_path / "trainer-result.json"
    result.write_text(json.dumps({"steps": {"sft": 2, "rl": 3}, "evaluations": {"afterRl": {"reward": 0.5}}}))
    complete_card(tmp_path, result)
    assert bool(read_origin(tmp_path / ORIGIN).evaluations) is taken
