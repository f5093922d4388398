"""The benchmarks one after the other, small, as one table: `make bench`. Run by itself, each prints more.

Figures of a machine that does nothing else are in README.md beside this file. Ends with 1 when a benchmark fails, ends
late, or finds a promise broken.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).parents[1]

LAST_LINES: Final = 15
"""Of what a failed benchmark printed."""


@dataclass(frozen=True)
class Benchmark:
    """One command, which prints one JSON object."""

    command: str
    """Below the repository's root, after `python`."""
    limit_s: float
    """Ten times what it takes on two idle cores: the machine may be shared, the suite must end."""
    figures: Mapping[str, str]
    """Name and unit -> where in the object, `a.b.0`."""


SUITE: Final = (
    Benchmark(
        "benchmarks/ledger_rows.py --tokens 300000",
        30,
        figures={
            "ledger: CPU seconds per million tokens": "cpuSecondsPerMillionTokens",
            "ledger: seconds to place 1,024 samples on 8 engines": "placeSeconds",
        },
    ),
    Benchmark(
        "benchmarks/manager/run.py --row 8x16x1000",
        60,
        figures={
            "manager: CPU seconds per million tokens": "cpuSecondsPerMillionTokens.0",
            "manager: bytes from agents per token": "bytesPerToken.0",
            "manager: p99 ms from a frame to its answer": "acceptMsP99.0",
        },
    ),
    Benchmark(
        "benchmarks/learner/run.py --pairs 5 --seconds 1",
        300,
        figures={"learner: tokens/s beside 16 busy rewards, divided by those without": "besideRewards"},
    ),
    Benchmark(
        "benchmarks/kills/run.py --kills 5 --between 4000 8000",
        600,
        figures={
            "kills: share of generated tokens kept": "keptShare",
            "kills: p50 seconds from a kill to the first tokens elsewhere": "killToFirstTokens.p50",
            "kills: longest seconds from a kill until all its samples flow": "killToAllTokens.max",
            "kills: bytes from agents per token": "bytesPerToken",
            "kills: promises broken": "violations",
        },
    ),
)


def measure(benchmark: Benchmark) -> dict[str, Any]:
    """What it printed. Raises RuntimeError when it failed, subprocess.TimeoutExpired when it did not end."""
    argv = [sys.executable, *benchmark.command.split()]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=benchmark.limit_s, check=False)
    if ended.returncode:
        last_lines = "\n".join((ended.stdout + ended.stderr).splitlines()[-LAST_LINES:])
        raise RuntimeError(f"{benchmark.command} ended with exit code {ended.returncode}\n{last_lines}")
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def figure(result: Any, path: str) -> str:
    """What is at `path`; of a list its length."""
    for step in path.split("."):
        result = result[int(step)] if isinstance(result, list) else result[step]
    return f"{len(result) if isinstance(result, list) else result:.4g}"


def main() -> int:
    """Exit code."""
    console, errors, failed = Console(), Console(stderr=True), 0
    table = Table("figure", "value", "command")
    table.columns[1].justify = "right"
    for benchmark in SUITE:
        errors.print(f"{benchmark.command} (at most {benchmark.limit_s:g} s)")
        try:
            result = measure(benchmark)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            errors.print(str(error), markup=False)
            failed += 1
            continue
        for number, (name, path) in enumerate(benchmark.figures.items()):
            table.add_row(name, figure(result, path), benchmark.command if number == 0 else "")
        table.add_section()
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
