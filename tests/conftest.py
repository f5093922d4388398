"""What all tests share: a seed, and one thread per process.

Tests draw anew at every run and print their seed; POLYRL_SEED repeats a draw, also that of property tests. Threads that
wait for each other by spinning crawl when a core is shared, hence one.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

SEED = os.environ.get("POLYRL_SEED")

# A test bounds facts: how fast a machine draws and runs examples is none.
hypothesis.settings.register_profile("anew", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("repeatable", hypothesis.settings.get_profile("anew"), derandomize=True)
hypothesis.settings.load_profile("repeatable" if SEED else "anew")


@pytest.fixture
def seed() -> int:
    """Of all that the test draws."""
    drawn = int(SEED) if SEED else random.SystemRandom().randrange(2**32)
    print(f"seed {drawn}, repeated by POLYRL_SEED={drawn}")
    return drawn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Schedules and exhaustive searches take seconds each."""
    for item in items:
        if Path(__file__).parent / "properties" in item.path.parents:
            item.add_marker(pytest.mark.slow)
