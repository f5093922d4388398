"""A group of ranks on this machine for tests: this process leads, the others are real processes, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyrl_trainer.backends.fsdp.start import LearnerGroup

WAIT_SECONDS = 120.0


@contextmanager
def group(ranks: int) -> Iterator[LearnerGroup]:
    """Ends its processes on the way out."""
    made = LearnerGroup(ranks, "cpu", threads=1, wait_seconds=WAIT_SECONDS)
    try:
        yield made
    finally:
        made.close()
