"""benchmarks/curves compares learning curves: what differs by more than seeds do is found, what does not is let be."""

from __future__ import annotations

import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "curves" / "tables.py"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = spec_from_file_location("curve_tables", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_curve_is_the_mean_of_each_window(tables: ModuleType) -> None:
    assert tables.windowed([1, 3, 2, 2, 0, 4, 5, 7]) == [2, 2, 2, 6]
    assert tables.windowed([0, 1, 2, 3, 4, 5]) == [0.5, 2, 3, 4.5]
    with pytest.raises(ValueError, match="3 steps make no 4 windows"):
        tables.windowed([1, 2, 3])


def test_t_is_welchs(tables: ModuleType) -> None:
    # Means 0.5 and 0.3; variances 0.01 and 0.0025, of three values each: 0.2 / sqrt(0.0125 / 3).
    assert tables.t_of([0.4, 0.5, 0.6], [0.25, 0.3, 0.35]) == pytest.approx(3.0984, abs=1e-4)
    assert tables.t_of([0.5, 0.5, 0.5], [0.51, 0.51, 0.51]) == pytest.approx(-0.01 / tables.NOISE_FLOOR)


def test_noise_is_found_to_be_noise_and_a_difference_is_not(tables: ModuleType) -> None:
    chance = random.Random(0)

    def side(gain: float) -> list[list[float]]:
        return [[0.2 + 0.1 * part + gain + chance.gauss(0, 0.02) for part in range(4)] for _ in range(3)]

    alike = sum(tables.is_seed_noise(side(0.0), side(0.0)) for _ in range(200))
    found = sum(not tables.is_seed_noise(side(0.15), side(0.0)) for _ in range(200))
    assert alike >= 180
    assert found >= 180


def test_the_table_names_each_side_and_window(tables: ModuleType) -> None:
    lines = tables.table({"k = 0": [[0.1] * 4, [0.3] * 4], "k = 1": [[0.1] * 4, [0.3] * 4]}, 60, "k = 0").splitlines()
    assert "1-15" in lines[0]
    assert "46-60" in lines[0]
    assert lines[1].count("0.200 ± 0.141") == 4
    assert lines[2].endswith("0.0 0.0 0.0 0.0")
