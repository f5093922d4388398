"""No command hands a terminal what models, agents, pods or received files wrote for it to obey."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from polyrl.errors import RunFailed, UserError
from polyrl_cli.app import app
from polyrl_cli.report.terminal import terminal

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
"""OSC 52 writes the clipboard."""
HOSTILE = f"[/INST] [bold]x[/] :skull: {CLIPBOARD} \x1b[2J\x9b2J \u202egnirts\u2066 a\rb\x00"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
CLI = Path(__file__).parents[2] / "cli" / "polyrl_cli"
JOB = Path(__file__).parents[2] / "examples/sort-digits/job.yaml"


def lines(*_: Any, **__: Any) -> list[str]:
    return [HOSTILE]


def emitted(*given: Any, **__: Any) -> None:
    given[-1](HOSTILE)


LINES: dict[str, tuple[str, Callable[..., Any], list[str]]] = {
    "status": ("polyrl_cli.remote.status.status_lines", lines, ["job"]),
    "logs": ("polyrl_cli.remote.logs.print_logs", emitted, ["job"]),
    "why": ("polyrl_cli.inspection.why.why_lines", lines, []),
    "explain": ("polyrl_cli.inspection.explain.explain_lines", lines, ["run", "1.0"]),
    "check": ("polyrl_cli.inspection.check.check_lines", lambda run: ([HOSTILE], True), []),
    "generate": ("polyrl_cli.model.generate.generate_lines", lines, ["run", "prompt"]),
    "export": ("polyrl_cli.model.export.export_lines", lines, ["run", "target"]),
    "get": ("polyrl_cli.model.get.get_from_cluster", emitted, ["job", "target"]),
    "reward": ("polyrl_cli.manifests.reward.reward_lines", lambda *_: ([HOSTILE], True), ["job.yaml"]),
    "validate": ("polyrl_cli.manifests.load.validation_report", lines, ["job.yaml"]),
}
"""What makes a command's lines; each is exchanged for one that makes hostile ones."""


@pytest.mark.parametrize("command", LINES)
def test_lines_are_harmless(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, made, arguments = LINES[command]
    monkeypatch.setattr(place, made)
    done = CliRunner().invoke(app, [command, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "[/INST] [bold]x[/] :skull: \\x1b]52" in done.stdout
    assert OBEYED.search(done.output) is None


@pytest.mark.parametrize("kind", [UserError, RunFailed])
def test_errors_are_harmless(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Path | None) -> list[str]:
        raise kind(HOSTILE)

    monkeypatch.setattr("polyrl_cli.inspection.why.why_lines", fail)
    done = CliRunner().invoke(app, ["why"], catch_exceptions=False)
    assert "\\x1b]52" in done.stderr
    assert OBEYED.search(done.output) is None


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "runs" / "one"
    root.mkdir(parents=True)
    recipe = {"mode": "rl", "algorithm": {"steps": 3, HOSTILE: HOSTILE}}
    (root / "job.json").write_text(json.dumps({"metadata": {"name": HOSTILE}, "spec": {"recipe": recipe}}))
    (root / "summary.json").write_text(json.dumps({"outcome": HOSTILE, "cause": HOSTILE, "wallSeconds": 7.0}))
    row = {"time": 100.0, "phase": "rl", "step": 3, "reward/mean": 0.5, HOSTILE: 1.0, f"reward/{HOSTILE}": 1.0}
    (root / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    event = {"time": 90.0, "t": 1.0, "event": "fault", "worker": HOSTILE, "text": HOSTILE}
    (root / "fleet.jsonl").write_text(json.dumps(event) + "\n")
    sample = {"time": 100.0, "step": 3, "group": 1, "sample": HOSTILE, "prompt": HOSTILE, "response": HOSTILE}
    (root / "samples.jsonl").write_text(json.dumps(sample | {"reward": 1.0, "kept": HOSTILE}) + "\n")
    return root


@pytest.mark.parametrize("command", ["ls", "compare", "samples", "top", "report"])
def test_a_received_folder_is_shown_harmlessly(run: Path, command: str) -> None:
    where = {"ls": [run.parent], "compare": [run, run]}.get(command, [run])
    done = CliRunner().invoke(app, [command, *map(str, where)], catch_exceptions=False)
    assert OBEYED.search(done.output) is None
    if (page := run / "report.html").exists():
        assert OBEYED.search(page.read_text()) is None


def test_a_console_prints_whatever_it_is_given_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    console, table = terminal(), Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    for shown in (HOSTILE, Text(HOSTILE), table, Panel(HOSTILE, title=Text(HOSTILE))):
        console.print(shown)
    printed = capsys.readouterr().out
    assert printed.count("[/INST]") == 7
    assert OBEYED.search(printed) is None


ONES_OF_OURS = {"commands/options.py": "typer.echo(", "report/terminal.py": "Console("}


def test_there_is_one_way_to_print_lines_and_one_console() -> None:
    found = []
    for path in CLI.rglob("*.py"):
        if path.name.endswith("in_container.py"):
            continue  # speaks with the command line, through a pipe
        for line in path.read_text().splitlines():
            for way in re.findall(r"typer\.echo\b|\bConsole\(|(?<![.\w])print\(|sys\.stdout\.write", line):
                own = ONES_OF_OURS.get(str(path.relative_to(CLI)), "")
                if not own.startswith(way) and "print(json_line(" not in line and not line.startswith('"""'):
                    found.append(f"{path.relative_to(CLI)}: {line.strip()}")
    assert found == []
