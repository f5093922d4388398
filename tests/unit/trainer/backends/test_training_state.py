"""A checkpoint of another format is refused by its number, never misread."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from polyrl.errors import InvalidData
from polyrl_trainer.backends.training_state import FORMAT_VERSION, STATE_FILE, read_state, write_checkpoint


def test_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 7, tensors={}, files={}, fsync=False)
    state = read_state(tmp_path)
    assert state.step == 7
    other = msgspec.structs.replace(state, format_version=FORMAT_VERSION + 1)
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(other))
    with pytest.raises(InvalidData, match=rf"format version {FORMAT_VERSION + 1}, this release reads {FORMAT_VERSION}"):
        read_state(tmp_path)
