"""What a check noted of rows reaches the user beside what it could not look at."""

from __future__ import annotations

from typing import Any

import pytest

from polyrl.wire.checks import CheckEnded, CheckMessage, CheckNote, CheckSkipped, CheckUnmade
from polyrl_cli.manifests import checks


@pytest.mark.parametrize("message", [CheckNote("few"), CheckUnmade("few"), CheckSkipped("few", "torch")])
def test_every_kind_of_note_is_shown(message: CheckMessage) -> None:
    nothing: Any = None  # of a process that ended its report
    checked = checks._read(nothing, [message, CheckEnded()], timed_out=False)
    assert any("few" in note for note in [*checked.notes, *checked.unmade])
    assert bool(checked.unmade) != isinstance(message, CheckNote), "faults may be left there alone"
