"""benchmarks/weights/faults.py goes on where an earlier part of it ended."""

from __future__ import annotations

import importlib
import json
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SEED = 16


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks/weights"))
    return importlib.import_module("faults")


def record(draw: Any, **other: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {"snapshots": [0.1], "served": 1, "torn": [], "unverified": [], "stuck": []}
    known = {"number": draw.number, "point": draw.point, "fault": draw.fault, "seconds": 0.5, "end": "serves"}
    return {**nothing, **known, **other}


def test_a_combination_is_drawn_alike_whatever_came_before_it_and_each_once_before_any_twice(
    faults: ModuleType,
) -> None:
    pairs = faults.combinations(True)
    first, again = (list(islice(faults.draws(SEED, True), 2 * len(pairs))) for _ in range(2))
    assert [(d.point, d.fault, d.dice.random()) for d in first] == [(d.point, d.fault, d.dice.random()) for d in again]
    for part in (first[: len(pairs)], first[len(pairs) :]):
        assert {(d.point, d.fault) for d in part} == set(pairs)


def test_what_a_file_has_is_added_up_and_gone_on_behind_a_line_cut_by_a_kill_left_out(
    faults: ModuleType, tmp_path: Path
) -> None:
    drawn, file = list(islice(faults.draws(SEED, True), 4)), tmp_path / "lines"
    records = [record(drawn[0]), record(drawn[1], end="", seconds=None), record(drawn[2], torn=["version 3"])]
    lines = [json.dumps(one) for one in [*records, record(drawn[3])]]
    file.write_text("\n".join(lines)[:-20])
    found = faults.Found(undisturbed=[0.1])
    for one in faults.records_of(file, SEED, True):
        found.add(one)
    assert found.done == 3
    summed = faults.summary(found)
    assert [summed[name] for name in ("combinations", "notReached", "torn", "unverified", "stuck")] == [2, 1, 1, 0, 0]
    assert found.is_bad


def test_a_file_of_another_seed_or_of_something_else_is_refused(faults: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("\n".join(json.dumps(record(draw)) for draw in islice(faults.draws(SEED + 1, True), 9)))
    with pytest.raises(SystemExit, match=r"--from .*: combination \d+ is not that of --seed 16"):
        faults.records_of(file, SEED, True)
    file.write_text("{not JSON}\n")
    with pytest.raises(SystemExit, match="not lines of JSON"):
        faults.records_of(file, SEED, True)
    assert faults.records_of(tmp_path / "none yet", SEED, True) == []


def test_an_engine_that_took_other_bytes_is_refused_as_managers_do(faults: ModuleType, tmp_path: Path) -> None:
    assert ("load", faults.OTHER_BYTES) in faults.combinations(False)
    plane = faults.Plane(tmp_path, tmp_path, faults.Found())
    plane.contents = {0: "aa" * 32, 1: "bb" * 32}
    assert not plane._is_refused(0, "aa" * 32)
    assert plane._is_refused(1, "cc" * 32)
    plane.starts += 1
    assert not plane._is_refused(1, "bb" * 32)
