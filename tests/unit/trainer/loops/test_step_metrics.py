"""The numbers of a step that are computed from its samples."""

from __future__ import annotations

import numpy as np

from polyrl_trainer.loops.step_metrics import duplicates_in_group
from polyrl_trainer.sample import Sample


def sample(group: int, *ids: int) -> Sample:
    tokens = np.array(ids, dtype=np.int64)
    return Sample(tokens, np.ones(len(ids), dtype=np.float32), prompt_length=0, group=group)


def test_duplicates_are_counted_within_groups_only() -> None:
    assert duplicates_in_group([sample(1, 5, 6), sample(1, 5), sample(2, 5, 6), sample(2, 5)]) == 0
    assert duplicates_in_group([sample(1, 5), sample(1, 5), sample(1, 5), sample(1, 6)]) == 0.5
