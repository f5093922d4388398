"""What all tests share: a seed, and one thread per process.

Tests draw anew at every run and print their seed; POLYRL_SEED repeats a draw, also that of property tests. Threads that
wait for each other by spinning crawl when a core is shared, hence one.
"""

from __future__ import annotations

import os
import random

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

SEED = os.environ.get("POLYRL_SEED")

hypothesis.settings.register_profile("repeatable", derandomize=True)
if SEED:
    hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def seed() -> int:
    """Of all that the test draws."""
    drawn = int(SEED) if SEED else random.SystemRandom().randrange(2**32)
    print(f"seed {drawn}, repeated by POLYRL_SEED={drawn}")
    return drawn
