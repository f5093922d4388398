"""What all tests share: a seed, and one thread per process.

Tests draw anew at every run and print their seed; POLYRL_SEED repeats a draw, also that of property tests. Threads that
wait for each other by spinning crawl when a core is shared, hence one.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

from polyrl import interpreter

os.environ.setdefault("OMP_NUM_THREADS", "1")

# With it jsonschema makes forty parsers of addresses as it is imported, in seconds; no test checks formats of texts.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Which loads all libraries that tests need."""
    with interpreter.loading():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Schedules and exhaustive searches take seconds each. A file's tests stay together in one process, because they
    share what they set up, unless they say otherwise."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
        if Path(__file__).parent / "properties" in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Blames who leaves torch without gradients, once; else each later test of its process that learns would fail."""
    done = yield
    torch = sys.modules.get("torch")
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        raise AssertionError("this test left torch without gradients")
    return done


def pytest_unconfigure() -> None:
    """Some libraries complain of what is still there when they are unloaded."""
    gc.unfreeze()
