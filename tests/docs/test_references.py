"""The two references that are made from code: public names for Python, commands for the command line."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LISTED = re.compile(r"^::: ([\w.]+)\.(\w+)$", re.MULTILINE)
PUBLIC = {
    "polyrl.control": {"DrainAnswer", "DrainRequest", "Endpoints", "Waits", "parse_endpoints"},
    "polyrl.errors": {
        "DeadlineExceeded", "InvalidCode", "InvalidData", "InvalidManifest", "PolyRLError", "ProtocolError",
        "RunFailed", "Superseded", "UserError",
    },
    "polyrl.manifest.job": {"PolyRLJob", "read_job"},
    "polyrl.sample": {"DiscardReason", "Finish", "Group", "Purpose", "Response", "SamplingParams", "Scored", "Span"},
    "polyrl.sample_record": {"Chosen", "SampleRecord"},
    "polyrl.status": {"EngineState", "EngineStatus", "ManagerStatus", "SampleCounts", "TokenCounts"},
    "polyrl.weights": {"WeightsRef"},
    "polyrl.wire": {"Batch", "GroupDropped", "HeldGroup", "TrainerWelcome", "TurnDone", "pack_ids", "unpack_ids"},
    "polyrl_operator.secret": {"write_run_keys", "write_engine_keys"},
    "polyrl_trainer.backend": {"LossInputs"},
    "polyrl_trainer.client": {"RequestRefused", "RolloutClient"},
    "polyrl_trainer.environments": {"CalculatorEnvironment", "Ending", "Environment", "Generate"},
    "polyrl_trainer.sample": {"Sample"},
    "polyrl_trainer.weights.publisher": {"WeightPublisher"},
}  # fmt: skip
"""What users may import. Taking a name away breaks programs that we do not see: the changelog says so first."""

OF_TYPES = {"Generate"}
"""An alias of a type: what it is for stands below it, where Python does not keep it."""


def names() -> list[tuple[str, str]]:
    return [(module, name) for module, listed in PUBLIC.items() for name in sorted(listed)]


def test_the_page_names_what_is_public_and_nothing_else() -> None:
    assert sorted(LISTED.findall((ROOT / "docs/reference/python.md").read_text())) == sorted(names())


@pytest.mark.parametrize(("module", "name"), names())
def test_a_public_name_can_be_imported_and_says_what_it_is_for(module: str, name: str) -> None:
    made: Any = getattr(importlib.import_module(module), name)
    own = [
        member
        for member, value in (vars(made) if isinstance(made, type) else {}).items()
        if inspect.isfunction(value) and not member.startswith("_")
    ]
    assert inspect.getdoc(made) or name in OF_TYPES, f"{module}.{name} has no docstring"
    assert [member for member in own if not inspect.getdoc(getattr(made, member))] == []


def test_the_page_of_the_command_line_is_current(tmp_path: Path) -> None:
    made = tmp_path / "cli.md"
    options = ["--name", "polyrl", "--title", "Command line", "--output", made]
    call = [sys.executable, "-P", "-m", "typer", "polyrl_cli.app", "utils", "docs", *options]
    subprocess.run(call, check=True, capture_output=True, timeout=60)
    assert (ROOT / "docs/reference/cli.md").read_text() == made.read_text(), "run `make crds`"
